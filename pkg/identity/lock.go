package identity

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/backoff"
)

const (
	// lockRetry is the poll interval of a lock that another process holds.
	lockRetry = 10 * time.Millisecond
	// lockWait bounds that wait; the other process writes a few files, which takes milliseconds.
	lockWait = 10 * time.Second
)

var errLocked = errors.New("another process holds the lock")

// fileLock is an exclusive flock(2) on a file. The kernel releases it when the process ends.
type fileLock struct{ file *os.File }

// tryLock takes the lock on path, or returns errLocked. A missing file is created.
func tryLock(path string) (*fileLock, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock file: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%s: %w", path, errLocked)
			}
			return nil, fmt.Errorf("flock %s: %w", path, err)
		}
		// The former holder may have removed the file between open and flock; another process could
		// then lock a new file of the same name.
		if isSameFile(f, path) {
			return &fileLock{file: f}, nil
		}
		_ = f.Close()
	}
}

func isSameFile(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	current, err := os.Lstat(path)
	return err == nil && os.SameFile(opened, current)
}

// waitLock takes the lock on path once it is free, within lockWait, or until ctx ends.
func waitLock(ctx context.Context, path string) (*fileLock, error) {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	for {
		l, err := tryLock(path)
		if !errors.Is(err, errLocked) || backoff.Sleep(ctx, lockRetry) != nil {
			return l, err
		}
	}
}

// release releases the lock and keeps the file.
func (l *fileLock) release() { _ = l.file.Close() }

// remove deletes the file while the lock is held, then releases the lock. A file of the same name
// that another process locked is kept.
func (l *fileLock) remove() (err error) {
	if isSameFile(l.file, l.file.Name()) {
		err = os.Remove(l.file.Name())
	}
	l.release()
	return err
}
