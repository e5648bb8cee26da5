package healthcheck

import (
	"math/rand/v2"
	"time"
)

// entry is one target. It is guarded by Checker.mu.
type entry struct {
	Health // State is never Overdue here
	plan   *plan
	// due is when the next check starts; index is its place in the schedule, or
	// -1 while the check runs.
	due   time.Time
	index int
	// streak counts equal outcomes in a row that speak against State. While State is
	// Starting, passing is which outcome they have.
	streak  int
	passing bool
	// alive is when a check last ended, or was to begin for the first time.
	alive time.Time
	// overdue is true from the Evaluate that found it so until a check ends.
	overdue bool
	judged  bool
	gone    bool // no longer configured
	hurried bool // is counted in Checker.hurried
	dirty   bool // is in Checker.dirty
	// reported is the state in the last Evaluation, if known is true.
	reported State
	// reportedSilent is Silent in it.
	reportedSilent bool
	known          bool
}

// deadline is when the target becomes overdue unless a check ends before.
func (e *entry) deadline() time.Time {
	return e.alive.Add(e.plan.Interval + e.plan.Timeout + overdueSlack)
}

// effective is the state as it is reported.
func (e *entry) effective() State {
	if e.overdue {
		return Overdue
	}
	return e.State
}

func (e *entry) health() Health {
	h := e.Health
	h.State = e.effective()
	return h
}

// count moves the state by rise and fall. The state from before an overdue time
// is believed again after a success, but not after a failure.
func (e *entry) count(success bool) {
	if e.overdue && !success {
		e.State, e.streak = NotReady, 0
		return
	}
	if success != e.passing {
		e.passing, e.streak = success, 0
	}
	if success && e.State == Ready || !success && e.State == NotReady {
		e.streak = 0
		return
	}
	e.streak++
	switch {
	case success && e.streak >= e.plan.Rise:
		e.State, e.streak = Ready, 0
	case !success && e.streak >= e.plan.Fall:
		e.State, e.streak = NotReady, 0
	}
}

// interval is the time between the starts of two checks. While a change is about
// to be decided it may be shorter.
func (e *entry) interval() time.Duration {
	if e.streak > 0 && e.plan.FastInterval > 0 {
		return e.plan.FastInterval
	}
	return e.plan.Interval
}

// hurries reports whether the target waits for its first verdict, and its checks
// not for those of others. One that cannot be checked does not hurry.
func (e *entry) hurries() bool {
	return !e.gone && e.State == Starting && e.LastError == ""
}

// next says when to check after a check that began and ended then. A steady
// target is checked each 90 to 100 % of its interval, never later, so that
// jitter makes no target overdue. The first steady check falls anywhere in the
// interval: targets that started together spread over it.
func (e *entry) next(began, now time.Time, first bool) time.Time {
	interval := e.interval()
	switch {
	case e.State == Starting && e.streak > 0 && e.passing:
		return now.Add(min(startRecheck, interval))
	case e.State == Starting && e.streak > 0:
		return now.Add(min(failedRecheck, interval))
	case first:
		return now.Add(rand.N(interval))
	}
	due := began.Add(interval - rand.N(interval/10))
	if due.Before(now) {
		return now
	}
	return due
}
