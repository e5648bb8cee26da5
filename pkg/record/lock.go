package record

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	lockName = "dataplane.lock"
	// lockTimeout is how long a process that has the records may take to end.
	lockTimeout = 2 * time.Second
	lockRetry   = 10 * time.Millisecond
)

// lock is an exclusive flock(2) on a file of its own, so that the records can be
// replaced while it is held. The kernel releases it when the process dies in whatever
// way.
type lock struct{ file *os.File }

// takeLock takes the lock, or returns ErrLocked after lockTimeout.
func takeLock(path string) (*lock, error) {
	deadline := time.Now().Add(lockTimeout)
	tick := time.NewTicker(lockRetry)
	defer tick.Stop()
	for {
		l, err := tryLock(path)
		if l != nil || err != nil {
			return l, err
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("%w: end it first, or name another directory", ErrLocked)
		}
		<-tick.C
	}
}

// tryLock takes the lock; nil while somebody else has it.
func tryLock(path string) (*lock, error) {
	f, err := openPlain(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	// Who had it may have removed the file between our open and our lock; somebody
	// else could then lock a new one beside us.
	if err == nil && same(f, path) {
		return &lock{file: f}, nil
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("flock %s: %w", path, err)
	}
	return nil, errors.Join(err, f.Close())
}

func same(f *os.File, path string) bool {
	ours, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(ours, there)
}

func (l *lock) release() error { return l.file.Close() }

// openPlain opens a regular file, and waits for nothing.
func openPlain(path string, flag int, mode os.FileMode) (*os.File, error) {
	f, err := os.OpenFile(path, flag|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: remove it", path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
