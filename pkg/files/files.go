package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Timeout bounds a call into a file system.
const Timeout = 2 * time.Second

// ErrHung is wrapped if a file system does not respond in time.
var ErrHung = errors.New("the file system hangs")

// Calls runs calls into file systems and waits at most [Timeout] for each. A call that takes longer
// is abandoned; its goroutine stays blocked until the file system responds. The zero Calls is ready
// for use and starts a call only after the previous one has ended.
type Calls struct {
	// Path is the file that the calls read. If it is set, a call is retried while older calls hang:
	// when the path resolves to another inode, and after [retryTime]. Writing calls have no Path: a
	// write that hung would later overwrite the content of its retry.
	Path string

	mu      sync.Mutex
	newest  *attempt // nil if the last call has ended
	running int      // goroutines that have not ended
}

// attempt is a call that has not ended.
type attempt struct {
	begin   time.Time
	since   time.Time // start of the first attempt that hung on this file
	file    inode     // inode of Path when the call began; zero while stat(2) hangs
	probing bool      // a goroutine compares file with the current inode
}

const (
	// retryTime is the shortest time between two attempts for the same inode. The delay grows to a
	// quarter of the time for which the calls have hung, so that a day costs 30 blocked threads.
	retryTime = 30 * time.Second
	// maxRunning bounds the goroutines, and thus the threads, that are blocked in hung calls.
	maxRunning = 64
)

type inode struct{ device, number uint64 }

// Do runs call and returns its results. It returns an error that wraps [ErrHung] if call takes
// longer than [Timeout], and the cause of ctx if ctx ends first; in both cases call continues, and
// further calls fail until it returns or [Calls.Path] permits another attempt.
func Do[T any](ctx context.Context, calls *Calls, what string, call func() (T, error)) (T, error) {
	var none T
	hung := fmt.Errorf("%s: %w: it did not answer within %v", what, ErrHung, Timeout)
	pending := calls.start(calls.replaced(ctx))
	if pending == nil {
		return none, hung
	}
	var result T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer calls.end(pending)
		// stat(2) may hang, too, so Do does not call it itself.
		calls.identify(pending)
		result, err = call()
	}()
	select {
	case <-done:
		return result, err
	case <-time.After(Timeout):
		return none, hung
	case <-ctx.Done():
		return none, context.Cause(ctx)
	}
}

// start returns a new attempt, or nil while the newest attempt hangs and must not be retried yet.
func (calls *Calls) start(replaced bool) *attempt {
	calls.mu.Lock()
	defer calls.mu.Unlock()
	now := time.Now()
	pending := &attempt{begin: now, since: now}
	if hung := calls.newest; hung != nil && !replaced {
		wait := max(retryTime, hung.begin.Sub(hung.since)/4)
		if calls.Path == "" || now.Sub(hung.begin) < wait {
			return nil
		}
		// The delay before a retry grows with the time since the first attempt.
		pending.since = hung.since
	}
	if calls.running >= maxRunning {
		return nil
	}
	calls.newest = pending
	calls.running++
	return pending
}

func (calls *Calls) end(pending *attempt) {
	calls.mu.Lock()
	defer calls.mu.Unlock()
	calls.running--
	// An abandoned attempt may end while its retry hangs, which still blocks further calls.
	if calls.newest == pending {
		calls.newest = nil
	}
}

// identify records the inode that the attempt reads.
func (calls *Calls) identify(pending *attempt) {
	if calls.Path == "" {
		return
	}
	file, _ := inodeOf(calls.Path) // the call returns the error
	calls.mu.Lock()
	defer calls.mu.Unlock()
	pending.file = file
}

// replaced reports whether the newest attempt hangs on a file that is no longer at Path. stat(2)
// may hang as well, so it runs in a goroutine and replaced waits at most Timeout.
func (calls *Calls) replaced(ctx context.Context) bool {
	calls.mu.Lock()
	hung := calls.newest
	if hung == nil || hung.probing || calls.Path == "" || calls.running >= maxRunning {
		calls.mu.Unlock()
		return false
	}
	hung.probing = true
	calls.running++
	calls.mu.Unlock()

	// Buffered, so that the goroutine ends even if replaced has timed out.
	answer := make(chan bool, 1)
	go func() {
		file, err := inodeOf(calls.Path)
		calls.mu.Lock()
		defer calls.mu.Unlock()
		hung.probing = false
		calls.running--
		answer <- err == nil && file != hung.file || errors.Is(err, fs.ErrNotExist)
	}()
	select {
	case replaced := <-answer:
		return replaced
	case <-time.After(Timeout):
	case <-ctx.Done():
	}
	return false
}

func inodeOf(path string) (inode, error) {
	info, err := os.Stat(path)
	if err != nil {
		return inode{}, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return inode{}, fmt.Errorf("stat %s: no inode", path)
	}
	return inode{stat.Dev, stat.Ino}, nil
}

// Read returns the content of a regular file of at most limit bytes. It does not block on special
// files. A mount may still block it: see [Do].
func Read(path string, limit int64) ([]byte, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file (%s)", path, info.Mode().Type())
	}
	// One byte more than the limit shows that the file exceeds it.
	data, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s is larger than %d KiB", path, limit>>10)
	}
	return data, err
}

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
