package task

import (
	"context"
	"sync"
	"time"
)

// awakeStep is the time between two looks at the clock. Of more than twice as much only this time
// counts: the rest is a stall.
const awakeStep = 50 * time.Millisecond

// WithAwakeTimeout returns a context that ends after this process has run for a time. A stall of
// the machine, or of this process, does not count: what the caller waits for may have happened
// during it, or have stalled, too.
func WithAwakeTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	ctx, watch := watchAwake(ctx, timeout)
	return ctx, watch.end
}

func watchAwake(ctx context.Context, timeout time.Duration) (context.Context, *awake) {
	ctx, cancel := context.WithCancel(ctx)
	watch := &awake{left: timeout, last: time.Now(), cancel: cancel}
	watch.mu.Lock()
	defer watch.mu.Unlock()
	watch.timer = time.AfterFunc(min(timeout, awakeStep), watch.look)
	return ctx, watch
}

type awake struct {
	mu     sync.Mutex
	timer  *time.Timer // nil at the end
	left   time.Duration
	last   time.Time // of the last look
	cancel func()
}

func (watch *awake) look() {
	watch.mu.Lock()
	defer watch.mu.Unlock()
	now := time.Now()
	ran := now.Sub(watch.last)
	if ran > 2*awakeStep {
		ran = awakeStep
	}
	watch.left, watch.last = watch.left-ran, now
	if watch.left <= 0 {
		watch.cancel()
	} else if watch.timer != nil {
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
	watch.cancel()
}
