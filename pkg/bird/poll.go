package bird

import "time"

const (
	// pollInterval is how often BIRD is polled without any event.
	pollInterval = time.Second
	// fastInterval is how often BIRD is polled while a change is expected: every command wakes a
	// BIRD before 2.14, which can sleep although work is scheduled.
	fastInterval = 5 * time.Millisecond
	// fastDuration bounds fast polling.
	fastDuration = 5 * time.Second
	// fastExtra is the number of fast polls after the expected state was observed.
	fastExtra = 2
)

type fastPoll struct {
	until time.Time
	more  int
}

func (f *fastPoll) start(now time.Time) { *f = fastPoll{now.Add(fastDuration), fastExtra} }

func (f *fastPoll) active(now time.Time) bool { return now.Before(f.until) }

// converged counts an observation of the expected state, and ends the period after fastExtra more.
func (f *fastPoll) converged() {
	if f.more--; f.more < 0 {
		f.until = time.Time{}
	}
}

// holdTimers schedules a poll for the expiry of an established session's hold timer: BIRD before
// 2.14 may sleep although the timer scheduled work, and a command wakes it.
type holdTimers struct {
	next    time.Time // the first expiry; zero: none
	overdue time.Time // since when a timer has expired and its session is still up
}

func (h *holdTimers) observe(at time.Time, protocols map[string]Protocol) {
	h.next = time.Time{}
	for _, p := range protocols {
		if end := at.Add(p.HoldTimer); p.Up() && p.HasHoldTimer && (h.next.IsZero() || end.Before(h.next)) {
			h.next = end
		}
	}
	if h.next.IsZero() || h.next.After(at) {
		h.overdue = time.Time{}
	} else if h.overdue.IsZero() {
		h.overdue = at
	}
}

func (h *holdTimers) wait(now time.Time) time.Duration {
	if h.next.IsZero() || !h.overdue.IsZero() && now.Sub(h.overdue) > fastDuration {
		return pollInterval
	}
	return min(max(h.next.Sub(now)+time.Millisecond, fastInterval), pollInterval)
}
