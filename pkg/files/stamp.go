package files

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// settleTime is the age from which a change of a file is certain to be the last one with its time:
// file systems keep times in units of up to 2 s.
const settleTime = 2 * time.Second

// Stamp identifies a state of a file: a file that is written, replaced or gets another mode or
// owner has another Stamp. The zero Stamp is that of no file. Stamps are comparable.
type Stamp struct {
	device, inode uint64
	size          int64
	changed       syscall.Timespec // ctime, which no process can set
}

// StampOf returns the Stamp of the file at path, which it opens: file systems of a network answer a
// mere stat from a cache of up to a minute. It may block like every call into a file system: see
// [Do].
func StampOf(path string) (_ Stamp, err error) {
	// Package os repeats calls that a signal interrupts, as it does in file systems of a network.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return Stamp{}, err
	}
	info, err := f.Stat()
	if err = errors.Join(err, f.Close()); err != nil {
		return Stamp{}, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return Stamp{}, fmt.Errorf("stat %s: no inode", path)
	}
	return Stamp{device: st.Dev, inode: st.Ino, size: st.Size, changed: st.Ctim}, nil
}

// Settled reports whether every change after now gives the file another Stamp. One that was taken
// soon after a change may be that of the next change as well.
func (s Stamp) Settled(now time.Time) bool {
	return s != Stamp{} && now.Sub(time.Unix(s.changed.Unix())) > settleTime
}

// Empty reports whether the file has no content.
func (s Stamp) Empty() bool { return s.size == 0 }

// SameFile reports whether both are Stamps of one inode, also with different contents.
func (s Stamp) SameFile(other Stamp) bool { return s.device == other.device && s.inode == other.inode }
