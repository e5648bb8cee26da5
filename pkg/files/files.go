package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Timeout bounds a call into a file system.
const Timeout = 2 * time.Second

// ErrHung is wrapped when a file system did not respond in time.
var ErrHung = errors.New("the file system hangs")

// Calls runs calls into file systems one at a time, so that a hung mount blocks at most one
// goroutine. The zero Calls is ready for use.
type Calls struct{ running atomic.Bool }

// Do runs call and returns its results, an error that wraps [ErrHung] when it does not end within
// [Timeout], or ctx's error. In the last two cases the call continues, and other calls fail at once
// until it ends.
func Do[T any](ctx context.Context, c *Calls, what string, call func() (T, error)) (T, error) {
	var none T
	hung := fmt.Errorf("%s: %w: it did not answer within %v", what, ErrHung, Timeout)
	if !c.running.CompareAndSwap(false, true) {
		return none, hung
	}
	var result T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer c.running.Store(false)
		result, err = call()
	}()
	timer := time.NewTimer(Timeout)
	defer timer.Stop()
	select {
	case <-done:
		return result, err
	case <-timer.C:
		return none, hung
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// Read returns the content of a regular file of at most limit bytes. It does not block on special
// files, and does not bound the time of a mount: see [Do].
func Read(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file (%s)", path, info.Mode().Type())
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s is larger than %d KiB", path, limit>>10)
	}
	return data, err
}
