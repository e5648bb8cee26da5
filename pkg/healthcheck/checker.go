package healthcheck

import (
	"container/heap"
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// firstSpacing is the time between the first checks of two new targets: 1 000 targets are
	// spread over 250 ms. A slower pace would not spare the neighbor table: every later check of a
	// dead address renews its entry (docs/operations.md).
	firstSpacing = 250 * time.Microsecond
	// maxConcurrent is the maximum number of concurrent checks. It allows a check every 1.2 s for
	// each of 10 000 targets that drop packets, at a timeout of 500 ms, which is not overdue.
	maxConcurrent = 4096
	// complainEvery is the minimum time between two log lines about checks that cannot run.
	complainEvery = 10 * time.Second
)

// Options configure a Checker.
type Options struct {
	// Log receives a line for each change of a target's state.
	Log *slog.Logger
	// Source is called before each check of a target that is not ready. It returns why a check of
	// address to lacks a source address, or "", and whether the lack is temporary. An invalid from
	// means that the kernel selects the source. If Source is nil, every check runs.
	Source func(to, from netip.Addr) (problem string, passing bool)

	// FWMark returns the fwmark whose packets the data plane routes to a target, whatever their
	// destination, or the reason why it has none. It is nil without a data plane.
	FWMark func(Key) (fwmark uint32, problem string)
	// VIPSource returns the source address for checks of VIPs of a family that configure none. It
	// should be outside the networks of the targets, so that replies take the path of the replies to
	// clients. With the zero Addr, or a nil VIPSource, the kernel selects the address.
	VIPSource func(vip.Family) netip.Addr

	// LocalVIP returns why packets to an address of a VIP do not leave this host, or "" if they do. If
	// it is nil, they always do.
	LocalVIP func(netip.Addr) string

	dial          dialFunc // of tests; nil for connections of the kernel
	maxConcurrent int      // 0: maxConcurrent, or half of the permitted file descriptors if these are fewer
}

// Checker checks targets. It implements task.Task. All methods may be called from any goroutine,
// and none waits for a check.
type Checker struct {
	Options
	epoch       time.Time // of the slots of checks
	ready       chan struct{}
	changed     chan struct{} // of size 1: Evaluate may have changes
	rescheduled chan struct{} // of size 1: the first check in the schedule changed
	entered     chan struct{} // of size 1: there are new targets
	pulse       task.Pulse

	mu         sync.Mutex
	streams    map[string]map[Key]*entry
	schedule   schedule[*entry]
	running    int                // checks in flight
	complained time.Time          // time of the last log line about checks that cannot run
	dirty      map[Key]struct{}   // may differ from their entry in reported
	reported   map[Key]reportedAs // in the last Evaluation
	unjudged   int                // targets without a verdict
	synced     bool
	// waiting are the targets without a fwmark, routings counts the calls of Routed.
	waiting   map[Key]*entry
	routings  uint64
	diagnoses chan probe // of checks that failed
	// scanAt is a lower bound of the time at which the next target becomes overdue.
	scanAt time.Time
}

// reportedAs is the part of Health whose change is reported.
type reportedAs struct {
	state     State
	deferred  bool
	diagnosis string
}

// New returns a checker without targets.
func New(o Options) *Checker {
	if o.maxConcurrent == 0 {
		o.maxConcurrent = maxConcurrent
		var limit syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil {
			o.maxConcurrent = int(max(1, min(maxConcurrent, limit.Cur/2)))
		}
	}
	return &Checker{
		Options: o, epoch: time.Now(), ready: make(chan struct{}),
		changed: make(chan struct{}, 1), rescheduled: make(chan struct{}, 1), entered: make(chan struct{}, 1),
		waiting: map[Key]*entry{}, diagnoses: make(chan probe, maxDiagnoses),
		streams: map[string]map[Key]*entry{}, dirty: map[Key]struct{}{}, reported: map[Key]reportedAs{},
	}
}

// Ready is closed once checks run.
func (c *Checker) Ready() <-chan struct{} { return c.ready }

// String names the task.
func (c *Checker) String() string { return "target-checker" }

// Overdue implements task.Loop.
func (c *Checker) Overdue() time.Duration { return c.pulse.Overdue() }

// Changed wakes the caller of [Checker.Evaluate]: a state changed, or a configuration was applied.
// Wake-ups conflate. An overdue target wakes no caller: only Evaluate detects it.
func (c *Checker) Changed() <-chan struct{} { return c.changed }

// Update replaces the targets of the changed streams, and removes streams. A target that remains
// keeps its state, even with a new interval, timeout, rise or fall. If the check itself changes,
// such as its port, the target starts again. A stream without a check has no targets here, and
// addresses of families that are not checked are ignored. The first Update is the first
// configuration of [Evaluation.Synced]. The cost follows the number of targets of the changed
// streams.
func (c *Checker) Update(changed []trench.Stream, removed []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for _, name := range removed {
		for _, e := range c.streams[name] {
			c.remove(e)
		}
		delete(c.streams, name)
	}
	var fresh []*entry
	for i := range changed {
		fresh = append(fresh, c.replace(&changed[i], now)...)
	}
	for i, e := range fresh {
		spacing := min(firstSpacing, e.plan.Interval/time.Duration(len(fresh)))
		e.due = now.Add(time.Duration(i) * spacing)
		e.alive = e.due
		heap.Push(&c.schedule, e)
		c.expect(e)
	}
	if len(fresh) > 0 {
		latest.Wake(c.entered)
	}
	c.sync()
	latest.Wake(c.changed)
	latest.Wake(c.rescheduled)
}

// replace sets the targets of a stream, and returns new ones, which are not in the schedule yet.
func (c *Checker) replace(s *trench.Stream, now time.Time) (fresh []*entry) {
	var p *plan
	old, entries := c.streams[s.Name], make(map[Key]*entry, len(c.streams[s.Name]))
	c.streams[s.Name] = entries
	for _, e := range old {
		p = e.plan // all targets of a stream share it
		break
	}
	var vips []vip.VIP
	if s.Check.Via.ToVIP(c.FWMark != nil) {
		vips = s.VIPs
	}
	if p == nil || p.Check != s.Check || !slices.Equal(p.of, vips) {
		p = newPlan(s.Check, vips...)
	}
	for _, t := range s.Targets {
		for _, a := range t.IPs {
			k, f := Key{Stream: s.Name, Name: t.Name, Addr: a}, vip.FamilyOf(a)
			if entries[k] != nil || p.port == 0 || !p.Families.Has(f) {
				continue
			}
			e := old[k]
			if e != nil && (e.plan == p || e.plan.subject(f) == p.subject(f)) {
				delete(old, k)
				c.retime(e, p, now)
			} else {
				e = &entry{Health: Health{Key: k, Since: now}, plan: p, slot: slot{index: -1}}
				c.unjudged++
				c.dirty[k] = struct{}{}
				fresh = append(fresh, e)
			}
			entries[k] = e
		}
	}
	for _, e := range old {
		c.remove(e)
	}
	return fresh
}

// remove ends the checks of a target that is in no stream any more.
func (c *Checker) remove(e *entry) {
	e.removed = true
	if e.index >= 0 {
		heap.Remove(&c.schedule, e.index)
	}
	delete(c.waiting, e.Key)
	if !e.judged {
		c.unjudged--
	}
	c.dirty[e.Key] = struct{}{}
}

// retime sets the plan of a target that remains; the timing may have changed.
func (c *Checker) retime(e *entry, p *plan, now time.Time) {
	if e.plan == p {
		return
	}
	e.plan, e.diagnosis = p, diagnosis{}
	if !e.overdue {
		// A shorter interval must not make a target overdue that was checked in time.
		e.alive = now
	}
	c.expect(e)
	if e.index >= 0 && e.due.After(now.Add(e.interval())) {
		e.due = now.Add(rand.N(e.interval()))
		c.schedule.fix(e.index)
	}
}

// expect lowers scanAt to the deadline of e if that is earlier.
func (c *Checker) expect(e *entry) {
	if at := e.deadline(); c.scanAt.IsZero() || at.Before(c.scanAt) {
		c.scanAt = at
	}
}

// sync sets synced once all targets of the first configuration have a verdict.
func (c *Checker) sync() {
	if !c.synced && c.unjudged == 0 {
		c.synced = true
		latest.Wake(c.changed)
	}
}

func (c *Checker) judge(e *entry) {
	if !e.judged {
		e.judged = true
		c.unjudged--
		c.sync()
	}
}

// entry returns a target, or nil.
func (c *Checker) entry(k Key) *entry { return c.streams[k.Stream][k] }

// Evaluate returns the changes since the last call, including targets that are overdue at now. One
// goroutine calls it at each [Checker.Changed] and at each heartbeat. Its cost follows the number
// of changes; about once a second it visits all targets.
func (c *Checker) Evaluate(now time.Time) Evaluation {
	c.mu.Lock()
	overdue := c.scan(now)
	result := Evaluation{Synced: c.synced}
	for k := range c.dirty {
		was, known := c.reported[k]
		if e := c.entry(k); e != nil {
			h := e.health()
			if is := e.reportedAs(); !known || is != was {
				c.reported[k] = is
				result.Changed = append(result.Changed, h)
			}
		} else if known {
			delete(c.reported, k)
			result.Removed = append(result.Removed, k)
		}
	}
	clear(c.dirty)
	c.mu.Unlock()
	if len(overdue) > 0 {
		c.Log.Warn("checks are overdue", "targets", len(overdue), "first", overdue[0].Name, "stream", overdue[0].Stream)
	}
	return result
}

// scan finds the targets that became overdue. Checks only move deadlines into the future, so no
// target becomes overdue before scanAt.
func (c *Checker) scan(now time.Time) (found []Key) {
	if c.scanAt.IsZero() || now.Before(c.scanAt) {
		return nil
	}
	c.scanAt = time.Time{}
	for _, entries := range c.streams {
		for _, e := range entries {
			switch {
			case e.overdue:
			case now.After(e.deadline()):
				e.overdue, e.Since = true, now
				c.judge(e)
				c.dirty[e.Key] = struct{}{}
				found = append(found, e.Key)
			default:
				c.expect(e)
			}
		}
	}
	return found
}

// List returns the state of all targets as of the last Evaluate, sorted.
func (c *Checker) List() []Health {
	c.mu.Lock()
	var list []Health
	for _, entries := range c.streams {
		for _, e := range entries {
			list = append(list, e.health())
		}
	}
	c.mu.Unlock()
	slices.SortFunc(list, func(a, b Health) int { return a.Compare(b.Key) })
	return list
}

// finish applies the outcome of a check and schedules the next.
func (c *Checker) finish(p probe, o outcome, now time.Time) {
	before, after, complain := c.apply(p, o, now)
	if complain {
		c.Log.Error("checks cannot run, the targets become overdue if this lasts", "error", o.reason)
	}
	if before.State != after.State {
		level := slog.LevelInfo
		if before.State == Starting && after.State == Ready {
			level = slog.LevelDebug // normal at each start, for thousands of targets
		}
		c.Log.Log(context.Background(), level, "target changed", "stream", after.Stream, "target", after.Name,
			"address", after.Addr, "from", before.State.String(), "to", after.State.String(), "error", after.LastError)
	}
}

func (c *Checker) apply(p probe, o outcome, now time.Time) (before, after Health, complain bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == c.maxConcurrent {
		latest.Wake(c.rescheduled) // the loop waits for this place
	}
	c.running--
	e := p.entry
	if e.removed || o.verdict == cancelled {
		return before, before, false
	}
	before = e.health()
	first := !e.judged
	delete(c.waiting, e.Key)
	if p.vip {
		o = c.examine(p, o, now)
	}
	e.LastError, e.Deferred = o.reason, o.verdict == deferred
	switch o.verdict {
	case notRun:
		if complain = now.Sub(c.complained) >= complainEvery; complain {
			c.complained = now
		}
	case deferred, unrouted:
		// No verdict, but the check was attempted in time: the target is not overdue.
		e.alive = now
		c.expect(e)
	default:
		e.count(o.verdict == succeeded)
		e.LastCheck, e.alive, e.overdue = now, now, false
		c.expect(e)
		if e.State != Starting {
			c.judge(e)
		}
	}
	after = e.health()
	if after.State != before.State {
		e.Since = now
	}
	if after.State != before.State || after.Deferred != before.Deferred {
		c.dirty[e.Key] = struct{}{}
		latest.Wake(c.changed)
	}
	others := len(c.schedule) + c.running
	e.due = e.next(p.began, now, c.epoch, first, others < fewTargets)
	switch {
	case o.verdict == deferred:
		e.due = now.Add(min(failedRecheck, e.interval()))
	case o.verdict == unrouted && p.routings != c.routings:
		e.due = now // a fwmark may have been added since
	case o.verdict == unrouted:
		e.due = now.Add(e.interval())
		c.waiting[e.Key] = e
	}
	heap.Push(&c.schedule, e)
	if e.index == 0 {
		latest.Wake(c.rescheduled)
	}
	return before, after, complain
}
