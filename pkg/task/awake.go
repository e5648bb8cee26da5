package task

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// awakeStep is the time between two looks at the clock.
	awakeStep = 50 * time.Millisecond
	// maxLate is the longest time between two looks that counts.
	maxLate = 500 * time.Millisecond
	// maxStalls bounds a wait of a process that is starved again and again.
	maxStalls = 3
)

// WithAwakeTimeout returns a context that ends after this process has run for a time. Stalls of the
// machine or of this process, three in all, do not end it: what the caller waits for may have
// happened during them, or have stalled, too. One of more than 500 ms does not count, and a shorter
// one leaves at least 50 ms. It has no Deadline, and a context that is derived from it ends with
// [context.Canceled], whose Cause is [context.DeadlineExceeded].
func WithAwakeTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	watch := watchAwake(ctx, timeout)
	return watch, watch.end
}

func watchAwake(ctx context.Context, timeout time.Duration) *awake {
	ctx, cancel := context.WithCancelCause(ctx)
	watch := &awake{Context: ctx, left: timeout, last: time.Now(), cancel: cancel}
	watch.mu.Lock()
	defer watch.mu.Unlock()
	watch.timer = time.AfterFunc(min(timeout, awakeStep), watch.look)
	return watch
}

type awake struct {
	context.Context
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	timer  *time.Timer // nil at the end
	left   time.Duration
	last   time.Time // of the last look
	stalls int
}

// Err is [context.DeadlineExceeded] after the time, as that of other timeouts.
func (watch *awake) Err() error {
	if errors.Is(context.Cause(watch.Context), context.DeadlineExceeded) {
		return context.DeadlineExceeded
	}
	return watch.Context.Err()
}

func (watch *awake) look() {
	watch.mu.Lock()
	defer watch.mu.Unlock()
	if watch.timer == nil {
		return
	}
	now := time.Now()
	ran := now.Sub(watch.last)
	switch least := watch.left - awakeStep; {
	case watch.stalls == maxStalls:
	case ran > maxLate:
		watch.stalls++
		ran = min(awakeStep, least)
	case ran > 2*awakeStep && ran > least:
		watch.stalls++
		ran = least
	}
	watch.left, watch.last = watch.left-ran, now
	if watch.left <= 0 {
		watch.cancel(context.DeadlineExceeded)
	} else {
		watch.timer.Reset(min(watch.left, awakeStep))
	}
}

func (watch *awake) end() {
	watch.mu.Lock()
	defer watch.mu.Unlock()
	if watch.timer != nil {
		watch.timer.Stop()
		watch.timer = nil
	}
	watch.cancel(nil)
}
