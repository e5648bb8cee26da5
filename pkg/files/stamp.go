package files

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// settleTime is the age at which no further change can get the same ctime: file systems store times
// with a granularity of up to 2 s.
const settleTime = 2 * time.Second

// Stamp identifies a version of a file: a write, a replacement, and a change of mode or owner give
// the file another Stamp. The zero Stamp belongs to no file. Stamps are comparable.
type Stamp struct {
	device, inode uint64
	size          int64
	changed       syscall.Timespec // ctime: unlike mtime, no process can set it
}

// StampOf returns the Stamp of the file at path. It opens the file, because network file systems
// answer a stat without open from a cache that is up to a minute old. It may block: see [Do].
func StampOf(path string) (_ Stamp, err error) {
	// Package os retries EINTR, which network file systems return for interrupted calls.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return Stamp{}, err
	}
	info, err := file.Stat()
	if err = errors.Join(err, file.Close()); err != nil {
		return Stamp{}, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return Stamp{}, fmt.Errorf("stat %s: no inode", path)
	}
	return Stamp{device: stat.Dev, inode: stat.Ino, size: stat.Size, changed: stat.Ctim}, nil
}

// Settled reports whether every change after now gives the file another Stamp. A Stamp taken
// shortly after a change may remain the same after the next change.
func (stamp Stamp) Settled(now time.Time) bool {
	return stamp != Stamp{} && now.Sub(time.Unix(stamp.changed.Unix())) > settleTime
}

// Empty reports whether the file has no content.
func (stamp Stamp) Empty() bool { return stamp.size == 0 }

// SameFile reports whether both Stamps have the same inode; the contents may differ.
func (stamp Stamp) SameFile(other Stamp) bool {
	return stamp.device == other.device && stamp.inode == other.inode
}
