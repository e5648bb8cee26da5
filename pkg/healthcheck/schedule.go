package healthcheck

import (
	"container/heap"
	"container/list"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// overdueSlack is how late a check may be beyond interval and timeout
	// (docs/architecture.md#readiness-of-a-vip).
	overdueSlack = time.Second
	// starvedAfter is the delay beyond which this process counts as starved of CPU time.
	starvedAfter = 50 * time.Millisecond
	// startRecheck is the time between the checks of a target without a verdict. With a rise of 2
	// it is most of the time from a registration to the route at the gateway, whose goal is 10 ms.
	// Rise ignores targets that flap; a target that never was ready has no flow to lose.
	startRecheck = 3 * time.Millisecond
	// failedRecheck is the same after a failed check, or after one that was deferred for lack of a
	// source address: a silent target has its verdict after fall timeouts, not after fall intervals.
	failedRecheck = 100 * time.Millisecond
	// slotsPerInterval and maxSlot bound how much earlier a check starts to share a wake-up.
	slotsPerInterval = 50
	maxSlot          = 20 * time.Millisecond
	// fewTargets at most share their wake-ups with each other and with other periodic work if their
	// interval is a multiple of sharedInstants.
	fewTargets     = 16
	sharedInstants = time.Second
)

// entry is one check of a target. It is guarded by Checker.mu.
type entry struct {
	Health // State is never Overdue here
	slot   // in Checker.schedule, unless a check runs
	of     *target
	plan   *plan
	// streak counts consecutive equal outcomes that contradict State. While State is Starting,
	// passing is their outcome.
	streak  int
	passing bool
	// alive is when a check last ended, or was to begin for the first time.
	alive   time.Time
	overdue bool // from the Evaluate that found it so until a check ends
	judged  bool // had a verdict
	starved bool // the last failure was noticed late and is not counted
	// removed marks a target that left its stream. The outcome of a running check is ignored.
	removed bool
	noted   *list.Element // in Checker.verdicts; nil without a verdict
	// vip is the index in plan.vips of the VIP that is checked next.
	vip       int
	diagnosis diagnosis
}

// path returns the path of the next check, without a fwmark; edit is its stream's, or nil.
func (entry *entry) path(edit *edit) path {
	family := vip.FamilyOf(entry.Addr)
	t, vips := path{to: entry.Addr, source: entry.plan.Source(family)}, entry.plan.vips[family]
	if edit != nil && len(vips) > 0 {
		vips = edit.vips[family]
	}
	if len(vips) > 0 {
		t.to, t.vip = vips[entry.vip%len(vips)], true
	}
	return t
}

// deadline is when the target becomes overdue unless a check ends before.
func (entry *entry) deadline() time.Time {
	return entry.alive.Add(entry.plan.Interval + entry.plan.Timeout + overdueSlack)
}

func (entry *entry) state() State {
	if entry.overdue {
		return Overdue
	}
	return entry.State
}

// count updates the state by rise and fall. After an overdue period a success restores the previous
// state, a failure does not.
func (entry *entry) count(success bool) {
	if entry.overdue && !success {
		entry.State, entry.streak = NotReady, 0
		return
	}
	if success != entry.passing {
		entry.passing, entry.streak = success, 0
	}
	if success && entry.State == Ready || !success && entry.State == NotReady {
		entry.streak = 0
		return
	}
	entry.streak++
	switch {
	case success && entry.streak >= entry.plan.Rise:
		entry.State, entry.streak = Ready, 0
	case !success && entry.streak >= entry.plan.Fall:
		entry.State, entry.streak = NotReady, 0
	}
}

// interval is the time between the starts of two checks, shorter while a change is to be decided.
func (entry *entry) interval() time.Duration {
	if entry.streak > 0 && entry.plan.FastInterval > 0 {
		return entry.plan.FastInterval
	}
	return entry.plan.Interval
}

// next returns when to check after a check that began and ended then. A steady target is checked
// each 90 to 100 % of its interval, never later, so that jitter makes no target overdue; with few
// targets at sharedInstants.
func (entry *entry) next(began, now, epoch time.Time, first, few bool) time.Time {
	interval := entry.interval()
	if entry.State == Starting && entry.streak > 0 {
		recheck := failedRecheck
		if entry.passing {
			recheck = startRecheck
		}
		return now.Add(min(recheck, interval))
	}
	if few && entry.State != Starting && interval%sharedInstants == 0 {
		due := began.Add(interval)
		if first {
			due = now.Add(sharedInstants + rand.N(interval-sharedInstants+1))
		}
		// By the wall clock, as package tick does.
		if due = due.Add(-time.Duration(due.UnixNano() % int64(sharedInstants))); due.After(now) {
			return due
		}
	}
	due := began.Add(interval - rand.N(interval/10))
	if first {
		// Anywhere in the interval: targets that started together spread over it.
		due = now.Add(rand.N(interval))
	}
	// Checks in one slot share one wake-up: with some hundred targets waking costs most.
	if slot := min(maxSlot, interval/slotsPerInterval); entry.State != Starting && slot > 0 {
		if start := epoch.Add(due.Sub(epoch).Truncate(slot)); start.After(now) {
			due = start
		}
	}
	if due.Before(now) {
		due = now
	}
	return due
}

// slot is when an item of a schedule is due, and its index there; -1 while it is in none.
type slot struct {
	due   time.Time
	index int
}

func (s *slot) at() *slot { return s }

// schedule is a heap for package container/heap: the item that is due first has index 0. It has a copy
// of the time of each item: of ten thousand targets, most are not in the processor's cache.
type schedule[T interface{ at() *slot }] []scheduled[T]

type scheduled[T any] struct {
	due  time.Time
	item T
}

var _ heap.Interface = (*schedule[*entry])(nil)

func (s schedule[T]) Len() int           { return len(s) }
func (s schedule[T]) Less(i, j int) bool { return s[i].due.Before(s[j].due) }
func (s schedule[T]) Swap(i, j int) {
	s[i], s[j] = s[j], s[i]
	s[i].item.at().index, s[j].item.at().index = i, j
}

func (s *schedule[T]) Push(x any) {
	item := x.(T)
	item.at().index = len(*s)
	*s = append(*s, scheduled[T]{item.at().due, item})
}

func (s *schedule[T]) Pop() any {
	last := len(*s) - 1
	x := (*s)[last].item
	x.at().index = -1
	*s = slices.Delete(*s, last, last+1) // which clears the element for the garbage collector
	return x
}

// fix restores the order after item i got another time.
func (s *schedule[T]) fix(i int) {
	(*s)[i].due = (*s)[i].item.at().due
	heap.Fix(s, i)
}
