package bird

import "time"

const (
	pollInterval = time.Second // between polls without an event
	// fastInterval is the poll interval while a change is expected: a poll wakes BIRD before 2.14.
	fastInterval = 5 * time.Millisecond
	fastDuration = 5 * time.Second // bounds fast polling
	fastExtra    = 2               // fast polls after the expected state was observed
)

type fastPoll struct {
	until time.Time
	more  int
}

func (f *fastPoll) start(now time.Time) { *f = fastPoll{now.Add(fastDuration), fastExtra} }

// converged counts an observation of the expected state and ends fast polling after fastExtra more.
func (f *fastPoll) converged() {
	if f.more--; f.more < 0 {
		f.until = time.Time{}
	}
}

// holdTimers schedules a poll for the expiry of a hold timer, at which BIRD before 2.14 may sleep.
type holdTimers struct {
	next    time.Time // first expiry; zero without a timer
	overdue time.Time // first poll at which a timer had expired but its session was still up
}

func (timers *holdTimers) observe(at time.Time, protocols map[string]Protocol) {
	timers.next = time.Time{}
	for _, p := range protocols {
		if end := at.Add(p.HoldTimer); p.Up() && p.HasHoldTimer && (timers.next.IsZero() || end.Before(timers.next)) {
			timers.next = end
		}
	}
	if timers.next.IsZero() || timers.next.After(at) {
		timers.overdue = time.Time{}
	} else if timers.overdue.IsZero() {
		timers.overdue = at
	}
}

func (timers *holdTimers) wait(now time.Time) time.Duration {
	if timers.next.IsZero() || !timers.overdue.IsZero() && now.Sub(timers.overdue) > fastDuration {
		return pollInterval
	}
	return min(max(timers.next.Sub(now)+time.Millisecond, fastInterval), pollInterval)
}
