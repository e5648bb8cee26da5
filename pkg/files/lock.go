package files

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrLocked is wrapped if another process holds the lock.
var ErrLocked = errors.New("another process holds the lock")

// Lock is an exclusive flock(2) on a file. The kernel releases it when the process ends.
type Lock struct{ file *os.File }

// TryLock acquires the lock on path without blocking. It creates a missing file. The error wraps
// [ErrLocked] if another process holds the lock.
func TryLock(path string) (*Lock, error) {
	for {
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock file: %w", err)
		}
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = file.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%s: %w", path, ErrLocked)
			}
			return nil, fmt.Errorf("flock %s: %w", path, err)
		}
		// The previous holder may have removed the file between open and flock. The lock would then be
		// on an unlinked inode, and another process could lock a new file of the same name.
		if isSameFile(file, path) {
			return &Lock{file: file}, nil
		}
		_ = file.Close()
	}
}

func isSameFile(file *os.File, path string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	current, err := os.Lstat(path)
	return err == nil && os.SameFile(opened, current)
}

// Path returns the path of the file.
func (lock *Lock) Path() string { return lock.file.Name() }

// Release releases the lock without removing the file.
func (lock *Lock) Release() { _ = lock.file.Close() }

// Remove deletes the file while the lock is held, then releases the lock. If path refers to another
// inode by then, that file is kept.
func (lock *Lock) Remove() (err error) {
	if isSameFile(lock.file, lock.file.Name()) {
		err = os.Remove(lock.file.Name())
	}
	lock.Release()
	return err
}
