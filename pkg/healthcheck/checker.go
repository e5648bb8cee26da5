package healthcheck

import (
	"container/heap"
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// overdueSlack is what a check may be late beyond interval and timeout
	// (docs/architecture.md#readiness-of-a-vip).
	overdueSlack = time.Second
	// startRecheck is the time between the checks of a target that has no
	// verdict yet: a start need not wait rise intervals. With a rise
	// of 2 it is most of what passes from a registration until the gateway knows,
	// for which 10 ms are the goal. Rise is there to see through targets that come
	// and go; one that never was ready costs no flow while its state is found out.
	startRecheck = 3 * time.Millisecond
	// failedRecheck is the same after a failed check, or one that was put off for lack
	// of a source address: a silent target has its verdict after fall timeouts, and
	// not after fall intervals.
	failedRecheck = 100 * time.Millisecond
	// sourceWait is how long a target without a verdict waits for the source address
	// of its checks: duplicate address detection takes up to 2 s.
	sourceWait = 10 * time.Second
	// firstSpacing is the time between the first checks of two new targets:
	// 1 000 targets are spread over 250 ms. A slower pace would not spare the neighbor
	// table: every later check of a dead address renews its entry (docs/operations.md).
	firstSpacing = 250 * time.Microsecond
	// maxConcurrent is how many checks run at once unless the options say
	// otherwise. 10 000 targets that swallow packets, at a timeout of 500 ms,
	// are then each checked every 1.2 s, which is not overdue.
	maxConcurrent = 4096
	// complainEvery bounds how often the log says that checks cannot run.
	complainEvery = 10 * time.Second
)

// Dialer opens connections; *net.Dialer is one. It should return when ctx ends.
type Dialer interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
}

// Sources knows the addresses of this machine.
type SourceAddresses interface {
	// Source reports why checks of an address from another one, or from one of the
	// kernel's choice, would fail for lack of a source address; "" if there is one.
	// passing reports whether that is expected to end by itself.
	Source(to, from netip.Addr) (problem string, passing bool)
}

// Options are the parts of a Checker that may be chosen.
type Options struct {
	// Log gets a line for each change of a target's state.
	Log *slog.Logger
	// Dialer opens the connections; nil is the kernel, from the source addresses of
	// the checks. Another Dialer has its own.
	Dialer Dialer
	// Sources is asked before each check of a target that is not ready. Nil: every
	// check runs.
	Sources SourceAddresses
	// MaxConcurrent is how many checks may run at once; 0 is 4096, or half of
	// the file descriptors that the process may have if these are fewer.
	MaxConcurrent int
}

// Checker checks targets. It implements task.Task. All methods may be called
// from any goroutine, and none waits for a check.
type Checker struct {
	log           *slog.Logger
	dialer        Dialer
	sources       SourceAddresses
	epoch         time.Time // slots are counted from here
	maxConcurrent int
	ready         chan struct{}
	changed       chan struct{} // of size 1: Evaluate has something to tell
	rescheduled   chan struct{} // of size 1: the loop must look at the schedule
	entered       chan struct{} // of size 1: there are new targets

	mu         sync.Mutex
	streams    map[string]*group
	targets    map[Key]*entry // those of all streams
	schedule   schedule
	running    int           // checks in flight
	hurried    int           // targets that wait for their first verdict
	complained time.Time     // when it was last logged that checks cannot run
	dirty      []*entry      // may have another state than reported
	removed    map[Key]State // no longer configured, with the state last reported
	unjudged   int           // targets without a first verdict
	synced     bool
	// scanAt is no later than the moment at which the first target becomes overdue.
	scanAt time.Time
}

// group is the targets of a stream, and how they are checked.
type group struct {
	plan    *plan
	entries []*entry
}

// NewChecker returns a checker without targets.
func New(o Options) *Checker {
	if o.MaxConcurrent <= 0 {
		o.MaxConcurrent = maxConcurrent
		var limit syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil && limit.Cur/2 < maxConcurrent {
			o.MaxConcurrent = max(1, int(limit.Cur/2))
		}
	}
	return &Checker{
		log:           o.Log,
		epoch:         time.Now(),
		dialer:        o.Dialer,
		sources:       o.Sources,
		maxConcurrent: o.MaxConcurrent,
		ready:         make(chan struct{}),
		changed:       make(chan struct{}, 1),
		rescheduled:   make(chan struct{}, 1),
		entered:       make(chan struct{}, 1),
		streams:       make(map[string]*group),
		targets:       make(map[Key]*entry),
		removed:       make(map[Key]State),
	}
}

// Ready is closed once checks run.
func (c *Checker) Ready() <-chan struct{} { return c.ready }

// String names the task.
func (c *Checker) String() string { return "target-checker" }

// Changed wakes the caller of [Checker.Evaluate]: a state changed, or a
// configuration was applied. Wake-ups conflate. That a target is overdue is
// found by Evaluate alone and wakes no caller.
func (c *Checker) Changed() <-chan struct{} { return c.changed }

// Configure replaces the targets of all streams, at once. A target that stayed
// keeps its state, also under another interval, timeout, rise or fall; when
// something else is checked now, such as another port, it starts again. Streams
// have distinct names and are not kept. Those without a check have no targets
// here, nor are addresses of families that are not checked among them.
//
// The first of Configure and Update is the first configuration that
// [Evaluation.Synced] speaks of.
func (c *Checker) Configure(streams []trench.Stream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := make(map[string]bool, len(streams))
	for i := range streams {
		kept[streams[i].Name] = true
	}
	var removed []string
	for name := range c.streams {
		if !kept[name] {
			removed = append(removed, name)
		}
	}
	c.update(streams, removed, time.Now())
}

// Update does what [Checker.Configure] does for some streams: it replaces the
// changed ones and forgets the removed ones. What it costs grows with the targets
// of these streams alone. A target that changes streams is another target.
func (c *Checker) Update(changed []trench.Stream, removed []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.update(changed, removed, time.Now())
}

func (c *Checker) update(changed []trench.Stream, removed []string, now time.Time) {
	for _, name := range removed {
		if g := c.streams[name]; g != nil {
			delete(c.streams, name)
			for _, e := range g.entries {
				c.remove(e)
			}
		}
	}
	var fresh []*entry
	for i := range changed {
		fresh = append(fresh, c.replace(&changed[i], now)...)
	}
	for i, e := range fresh {
		spacing := min(firstSpacing, e.plan.Interval/time.Duration(len(fresh)))
		c.enter(e, now.Add(time.Duration(i)*spacing))
	}
	if len(fresh) > 0 {
		latest.Wake(c.entered)
	}
	c.judge()
	latest.Wake(c.changed)
	latest.Wake(c.rescheduled)
}

// replace gives a stream its targets, and returns those that start, which are
// still to be entered into the schedule.
func (c *Checker) replace(s *trench.Stream, now time.Time) (fresh []*entry) {
	g := c.streams[s.Name]
	if g == nil {
		g = &group{}
		c.streams[s.Name] = g
	}
	if g.plan == nil || g.plan.Check != s.Check {
		g.plan = newPlan(s.Check)
	}
	before := g.entries
	g.entries = nil
	wanted := make(map[Key]*entry, len(before))
	for _, t := range s.Targets {
		for _, a := range t.IPs {
			k := Key{Stream: s.Name, Name: t.Name, Addr: a}
			if wanted[k] != nil || g.plan.port() == 0 || !g.plan.Families.Has(vip.FamilyOf(a)) {
				continue
			}
			e := c.targets[k]
			if f := vip.FamilyOf(a); e != nil && e.plan != g.plan && e.plan.subject(f) != g.plan.subject(f) {
				c.remove(e)
				e = nil
			}
			if e != nil {
				c.retime(e, g.plan, now)
			} else {
				e = c.add(k, g.plan, now)
				fresh = append(fresh, e)
			}
			wanted[k] = e
			g.entries = append(g.entries, e)
		}
	}
	for _, e := range before {
		if !e.gone && wanted[e.Key] == nil {
			c.remove(e)
		}
	}
	return fresh
}

// remove forgets a target. A check of it that runs ends unheard.
func (c *Checker) remove(e *entry) {
	delete(c.targets, e.Key)
	e.gone = true
	c.hurry(e)
	if e.index >= 0 {
		heap.Remove(&c.schedule, e.index)
	}
	if !e.judged {
		c.unjudged--
	}
	if e.known {
		c.removed[e.Key] = e.reported
	}
}

// add makes a target known, which is not yet scheduled.
func (c *Checker) add(k Key, p *plan, now time.Time) *entry {
	e := &entry{Health: Health{Key: k, State: Starting, Since: now}, plan: p, index: -1}
	// A target that left and came back between two Evaluates is not reported as
	// removed.
	e.reported, e.known = c.removed[k]
	delete(c.removed, k)
	c.targets[k] = e
	c.unjudged++
	c.touch(e)
	return e
}

// enter schedules the first check of a target.
func (c *Checker) enter(e *entry, due time.Time) {
	e.due, e.alive = due, due
	heap.Push(&c.schedule, e)
	c.expect(e)
	c.hurry(e)
}

// hurry counts the targets that wait for their first verdict.
func (c *Checker) hurry(e *entry) {
	if hurried := e.hurries(); hurried != e.hurried {
		e.hurried = hurried
		if hurried {
			c.hurried++
		} else {
			c.hurried--
		}
	}
}

// retime gives a target that stayed a plan that may have another timing.
func (c *Checker) retime(e *entry, p *plan, now time.Time) {
	if e.plan == p {
		return
	}
	e.plan = p
	if !e.overdue {
		// A shorter interval must not make overdue what was checked in time.
		e.alive = now
	}
	c.expect(e)
	if latest := now.Add(e.interval()); e.index >= 0 && e.due.After(latest) {
		e.due = now.Add(rand.N(e.interval()))
		heap.Fix(&c.schedule, e.index)
	}
}

// touch puts the target among those that Evaluate looks at.
func (c *Checker) touch(e *entry) {
	if !e.dirty {
		e.dirty = true
		c.dirty = append(c.dirty, e)
	}
}

// expect keeps scanAt no later than the moment at which e becomes overdue.
func (c *Checker) expect(e *entry) {
	if at := e.deadline(); c.scanAt.IsZero() || at.Before(c.scanAt) {
		c.scanAt = at
	}
}

// judge notes when the first verdict on all targets is known. It is called
// when a configuration was applied and when a verdict came.
func (c *Checker) judge() {
	if !c.synced && c.unjudged == 0 {
		c.synced = true
		latest.Wake(c.changed)
	}
}

func (c *Checker) judged(e *entry) {
	if !e.judged {
		e.judged = true
		c.unjudged--
		c.judge()
	}
}

// Evaluate tells what changed since it was last called, with the targets that
// are overdue at now. It is for one caller, which calls it at each [Checker.Changed]
// and at each heartbeat. Its cost grows with the number of changes; all targets
// are looked at about once a second.
func (c *Checker) Evaluate(now time.Time) Evaluation {
	c.mu.Lock()
	overdue := c.scan(now)
	var result Evaluation
	for _, e := range c.dirty {
		e.dirty = false
		if state := e.effective(); !e.gone && (!e.known || state != e.reported || (state == NotReady && e.Silent != e.reportedSilent)) {
			e.reported, e.reportedSilent, e.known = state, e.Silent, true
			result.Changed = append(result.Changed, e.health())
		}
	}
	clear(c.dirty)
	c.dirty = c.dirty[:0]
	for k := range c.removed {
		result.Removed = append(result.Removed, k)
	}
	clear(c.removed)
	result.Synced = c.synced
	c.mu.Unlock()
	if len(overdue) > 0 {
		c.log.Warn("checks are overdue", "targets", len(overdue), "first", overdue[0].Name, "stream", overdue[0].Stream)
	}
	return result
}

// scan finds the targets that became overdue. Deadlines only move into the
// future while checks end, so that it has nothing to do before scanAt.
func (c *Checker) scan(now time.Time) (found []Key) {
	if c.scanAt.IsZero() || now.Before(c.scanAt) {
		return nil
	}
	c.scanAt = time.Time{}
	for _, e := range c.targets {
		switch {
		case e.overdue:
		case now.After(e.deadline()):
			e.overdue = true
			e.Since = now
			c.judged(e)
			c.touch(e)
			found = append(found, e.Key)
		default:
			c.expect(e)
		}
	}
	return found
}

// List returns the state of all targets as of the last Evaluate, sorted.
func (c *Checker) List() []Health {
	c.mu.Lock()
	list := make([]Health, 0, len(c.targets))
	for _, e := range c.targets {
		list = append(list, e.health())
	}
	c.mu.Unlock()
	slices.SortFunc(list, func(a, b Health) int { return a.Compare(b.Key) })
	return list
}
