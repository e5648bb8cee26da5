// Package files reads files without blocking for ever: on a FIFO that has no
// writer, or on a mount whose server does not answer.
package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Timeout is how long a file system gets to answer.
const Timeout = 2 * time.Second

// ErrHung says that a file system did not answer in time.
var ErrHung = errors.New("the file system hangs")

// Calls runs calls into file systems, one at a time, so that a mount that hangs
// blocks one goroutine at most. The zero Calls is ready for use.
type Calls struct {
	mu      sync.Mutex
	pending chan struct{} // closed when the call that runs has ended; nil: none
}

// Do runs call and returns its results, or an error that wraps [ErrHung] when it does
// not end within [Timeout], or ctx's error. The call continues in both cases, and
// until it ends other calls fail at once.
func Do[T any](ctx context.Context, c *Calls, what string, call func() (T, error)) (T, error) {
	var none T
	hung := fmt.Errorf("%s: %w: it did not answer within %v", what, ErrHung, Timeout)
	done := make(chan struct{})
	c.mu.Lock()
	if c.pending != nil {
		select {
		case <-c.pending:
		default:
			c.mu.Unlock()
			return none, hung
		}
	}
	c.pending = done
	c.mu.Unlock()

	var result T
	var err error
	go func() {
		defer close(done)
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

// Read returns the content of a regular file of at most limit bytes. It opens
// nothing that would block, and does not bound the time that a mount takes: see [Do].
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
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%s is larger than %d KiB", path, limit>>10)
	}
	return data, nil
}
