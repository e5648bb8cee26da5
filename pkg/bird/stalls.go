package bird

import (
	"sync"
	"time"
)

// stalls notices whether this process was starved of CPU time during a wait for BIRD. A stall may
// begin and end within the wait: then a deadline expires in time although BIRD could not answer.
type stalls struct {
	mu    sync.Mutex
	timer *time.Timer // nil at the end
	due   time.Time   // of the timer
	late  bool        // the timer was
}

func watchStalls() *stalls {
	watch := &stalls{due: time.Now().Add(starved)}
	watch.mu.Lock()
	defer watch.mu.Unlock()
	watch.timer = time.AfterFunc(starved, func() { watch.look(time.Now(), false) })
	return watch
}

// look reports whether the timer was late, as it is in each stall of more than 2 * starved.
func (watch *stalls) look(now time.Time, last bool) bool {
	watch.mu.Lock()
	defer watch.mu.Unlock()
	watch.late = watch.late || now.Sub(watch.due) > starved
	watch.due = now.Add(starved)
	switch {
	case watch.timer == nil:
	case last:
		watch.timer.Stop()
		watch.timer = nil
	default:
		watch.timer.Reset(starved)
	}
	return watch.late
}
