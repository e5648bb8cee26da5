package logs

import (
	"sync"
	"time"
)

// Throttle permits one line per second and counts the others, so that a peer cannot fill the log.
// The zero Throttle is ready for use.
type Throttle struct {
	mu     sync.Mutex
	last   time.Time
	missed int
}

// Allow reports whether a line may be written, and how many were suppressed before it.
func (t *Throttle) Allow(now time.Time) (missed int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.last.IsZero() && now.Sub(t.last) < time.Second {
		t.missed++
		return 0, false
	}
	missed = t.missed
	t.last, t.missed = now, 0
	return missed, true
}
