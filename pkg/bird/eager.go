package bird

import "time"

const (
	// pollInterval is how often BIRD is asked when nothing hints at a change.
	pollInterval = time.Second
	// eagerInterval is how often it is asked while something is expected: every
	// command wakes a BIRD before 2.14 that sleeps over scheduled work.
	eagerInterval = 5 * time.Millisecond
	// eagerTime bounds that.
	eagerTime = 5 * time.Second
	// eagerMore is how often it is asked again after all was as expected.
	eagerMore = 2
)

// eagerness tells how closely BIRD is watched.
type eagerness struct {
	until time.Time
	more  int
}

func (e *eagerness) begin(now time.Time) { *e = eagerness{now.Add(eagerTime), eagerMore} }

func (e *eagerness) on(now time.Time) bool { return now.Before(e.until) }

// satisfied counts down once all is as expected.
func (e *eagerness) satisfied() {
	if e.more--; e.more < 0 {
		e.until = time.Time{}
	}
}

// holdTimers tells when a hold timer of an established session runs out. BIRD
// before 2.14 may sleep over the work that the timer scheduled, so it is asked
// right then.
type holdTimers struct {
	next    time.Time // the first to run out; zero: there is none
	overdue time.Time // since when one has run out without consequence
}

// saw takes over what BIRD said at a time.
func (h *holdTimers) saw(at time.Time, protocols map[string]Protocol) {
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

// wait is how long the next look may wait.
func (h *holdTimers) wait(now time.Time) time.Duration {
	if h.next.IsZero() || !h.overdue.IsZero() && now.Sub(h.overdue) > eagerTime {
		return pollInterval
	}
	return min(max(h.next.Sub(now)+time.Millisecond, eagerInterval), pollInterval)
}
