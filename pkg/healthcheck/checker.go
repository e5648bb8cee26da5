package healthcheck

import (
	"cmp"
	"container/heap"
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"
	"unique"

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
	// Heartbeat is the longest time between two calls of Evaluate. A longer one is a stall of this
	// process, which makes no target overdue. If it is 0, no stall is recognized.
	Heartbeat time.Duration
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

	// LocalVIP returns why packets to an address of a VIP stay on this host, or ""; nil: none stay.
	LocalVIP func(netip.Addr) string

	dial          dialFunc // of tests; nil for connections of the kernel
	maxConcurrent int      // 0: maxConcurrent, or half of the permitted file descriptors if these are fewer
}

// Checker is a task that checks targets. Methods are safe for concurrent use, and await no check.
type Checker struct {
	Options
	epoch       time.Time // of the slots of checks
	ready       chan struct{}
	changed     chan struct{} // of size 1: Evaluate may have changes
	rescheduled chan struct{} // of size 1: the first check in the schedule changed
	entered     chan struct{} // of size 1: there are new targets
	pulse       task.Pulse

	mu      sync.Mutex
	streams map[string]map[Key]*target
	edits   map[string]*edit // of checks that have not replaced the old ones yet, by stream
	// verdicts has the checks with a verdict that is not overdue by VIP, and by all their VIPs. gone
	// lists those that the running Update removes: they pass on their verdicts until it ends.
	verdicts   map[checked]map[unique.Handle[string]]peers
	gone       []*entry
	schedule   schedule[*entry]
	running    int                // checks in flight
	complained time.Time          // time of the last log line about checks that cannot run
	dirty      map[Key]struct{}   // may differ from their entry in reported
	reported   map[Key]reportedAs // in the last Evaluation
	unjudged   int                // targets without a verdict
	synced     bool
	// waiting are the targets without a fwmark, routings counts the calls of Routed.
	waiting   map[*entry]struct{}
	routings  uint64
	diagnoses chan probe // of checks that failed
	// scanAt is a lower bound of the time at which the next target becomes overdue.
	scanAt time.Time
	// evaluateBy is when the next Evaluate is due; zero before the first.
	evaluateBy time.Time
}

// New returns a checker without targets.
func New(options Options) *Checker {
	if options.maxConcurrent == 0 {
		options.maxConcurrent = maxConcurrent
		var limit syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil {
			options.maxConcurrent = int(max(1, min(maxConcurrent, limit.Cur/2)))
		}
	}
	return &Checker{
		Options: options, epoch: time.Now(), ready: make(chan struct{}),
		changed: make(chan struct{}, 1), rescheduled: make(chan struct{}, 1), entered: make(chan struct{}, 1),
		waiting: map[*entry]struct{}{}, diagnoses: make(chan probe, maxDiagnoses),
		streams: map[string]map[Key]*target{}, edits: map[string]*edit{},
		verdicts: map[checked]map[unique.Handle[string]]peers{},
		dirty:    map[Key]struct{}{}, reported: map[Key]reportedAs{},
	}
}

// Ready is closed once checks run.
func (checker *Checker) Ready() <-chan struct{} { return checker.ready }

// String names the task.
func (checker *Checker) String() string { return "target-checker" }

// Overdue implements task.Loop.
func (checker *Checker) Overdue() time.Duration { return checker.pulse.Overdue() }

// Changed wakes the caller of [Checker.Evaluate]: a state changed, or a configuration was applied.
// Wake-ups conflate. An overdue target wakes no caller: only Evaluate detects it.
func (checker *Checker) Changed() <-chan struct{} { return checker.changed }

// Update replaces the targets of the changed streams, and removes streams. A target that remains
// keeps its state, even with a new interval, timeout, rise or fall. If the check itself changes,
// such as its port, the old one decides until the new one can; see edit. A new target has the
// verdict of another one with the same address and check, which may leave with this Update: its
// stream may have got another name. A stream without a check has no targets here, and addresses of
// families that are not checked are ignored. The first Update is the first configuration of
// [Evaluation.Synced]. The cost follows the number of targets of the changed streams.
func (checker *Checker) Update(changed []trench.Stream, removed []string) {
	checker.mu.Lock()
	defer checker.mu.Unlock()
	now := time.Now()
	for _, name := range removed {
		for _, target := range checker.streams[name] {
			checker.remove(target)
		}
		delete(checker.streams, name)
		delete(checker.edits, name)
	}
	var fresh []*entry
	for i := range changed {
		fresh = append(fresh, checker.replace(&changed[i], now)...)
	}
	// Spread the first checks, or a large new stream would cause a burst of packets.
	for i, entry := range fresh {
		// A target with a verdict keeps the time of its next check.
		if !entry.judged {
			spacing := min(firstSpacing, entry.plan.Interval/time.Duration(len(fresh)))
			entry.due = now.Add(time.Duration(i) * spacing)
			entry.alive = entry.due
		}
		heap.Push(&checker.schedule, entry)
		checker.expect(entry)
	}
	checker.forget()
	if len(fresh) > 0 {
		latest.Wake(checker.entered)
	}
	latest.Wake(checker.changed)
	latest.Wake(checker.rescheduled)
}

// replace sets the targets of a stream, and returns new ones, which are not in the schedule yet.
func (checker *Checker) replace(s *trench.Stream, now time.Time) (fresh []*entry) {
	plans, anyPasses := checker.plansOf(s)
	old, targets := checker.streams[s.Name], make(map[Key]*target, len(checker.streams[s.Name]))
	checker.streams[s.Name] = targets
	// They visit all VIPs, so they are called for new targets only.
	sources := sync.OnceValue(func() [len(vip.Families)][][]peers { return checker.sources(plans) })
	last := lastOf(old)
	lastSources := sync.OnceValue(func() [len(vip.Families)][][]peers { return checker.sources(last.plans()) })
	for _, configured := range s.Targets {
		for _, a := range configured.IPs {
			key, family := Key{Stream: s.Name, Name: configured.Name, Addr: a}, vip.FamilyOf(a)
			if targets[key] != nil || plans[0].port == 0 || !plans[0].Families.Has(family) {
				continue
			}
			kept := old[key]
			if kept != nil && kept.keeps(plans, anyPasses, family) {
				delete(old, key)
				for i, member := range kept.members {
					checker.retime(member, plans[i], now)
				}
				targets[key] = kept
				continue
			}
			entered := checker.enter(key, plans, sources()[family], anyPasses, now)
			targets[key], fresh = entered, append(fresh, entered.members...)
			if last == nil || entered.state == Ready || !cmp.Or(kept, last).isReplaced(plans, anyPasses, family) {
				continue
			}
			if before := checker.edits[s.Name]; before == nil || before.check != s.Check {
				checker.edits[s.Name] = &edit{check: s.Check, ends: now.Add(maxWait)}
			}
			if kept == nil {
				kept = checker.enter(key, last.plans(), lastSources()[family], last.anyPasses, now)
				fresh = append(fresh, kept.members...)
			}
			if entered.before = kept.before; kept.before == nil {
				entered.before = kept
				delete(old, key)
			}
			kept.before = nil // which an edit during an edit passes on
		}
	}
	if edit := checker.edits[s.Name]; edit != nil {
		edit.minReady, edit.due = s.MinReady, time.Time{}
		edit.vips = firstAddresses(s.VIPs)
	}
	// old now has only the targets that left the stream or whose check decides no longer.
	for _, target := range old {
		checker.remove(target)
	}
	return fresh
}

// enter returns a new target, whose members are not in the schedule yet.
func (checker *Checker) enter(key Key, plans []*plan, sources [][]peers, anyPasses bool, now time.Time) *target {
	entered := &target{anyPasses: anyPasses}
	for i, p := range plans {
		member := &entry{Health: Health{Key: key, Since: now}, plan: p, of: entered, slot: slot{index: -1}}
		member.inherit(sources[i])
		checker.note(member, true)
		entered.members = append(entered.members, member)
		if member.Since.After(entered.since) {
			entered.since = member.Since
		}
	}
	entered.join(entered.since)
	if entered.judged = entered.state != Starting; !entered.judged {
		checker.unjudged++
	}
	checker.dirty[key] = struct{}{}
	return entered
}

// remove ends the checks of a target that is in no stream any more.
func (checker *Checker) remove(target *target) {
	for ; target != nil; target = target.before {
		for _, entry := range target.members {
			entry.removed = true
			checker.gone = append(checker.gone, entry)
			if entry.index >= 0 {
				heap.Remove(&checker.schedule, entry.index)
			}
			delete(checker.waiting, entry)
		}
		if !target.judged {
			checker.unjudged--
		}
		checker.dirty[target.members[0].Key] = struct{}{}
	}
}

// retime sets the plan of a target that remains; the timing may have changed.
func (checker *Checker) retime(entry *entry, plan *plan, now time.Time) {
	if entry.plan == plan {
		return
	}
	checker.note(entry, false)
	entry.plan, entry.diagnosis = plan, diagnosis{}
	checker.note(entry, true)
	if !entry.overdue {
		// A shorter interval must not make a target overdue that was checked in time.
		entry.alive = now
	}
	checker.expect(entry)
	if entry.index >= 0 && entry.due.After(now.Add(entry.interval())) {
		entry.due = now.Add(rand.N(entry.interval()))
		checker.schedule.fix(entry.index)
	}
}

// expect lowers scanAt to the deadline of a target if that is earlier.
func (checker *Checker) expect(e *entry) {
	if at := e.deadline(); checker.scanAt.IsZero() || at.Before(checker.scanAt) {
		checker.scanAt = at
	}
}

// sync sets synced once all targets of the first configuration have a verdict.
func (checker *Checker) sync() {
	if !checker.synced && checker.unjudged == 0 {
		checker.synced = true
		latest.Wake(checker.changed)
	}
}

// judge applies a change of a member to its target.
func (checker *Checker) judge(entry *entry, now time.Time) {
	entry.judged = entry.judged || entry.state() != Starting
	checker.note(entry, true)
	target := entry.of
	before := target.state
	if target.join(now); target.state != Starting && !target.judged {
		target.judged = true
		checker.unjudged--
		checker.sync()
	}
	if edit := checker.edits[entry.Stream]; edit != nil && target.state != before {
		edit.due = edit.rest
	}
}

// Evaluate returns the changes since the last call, including targets that are overdue at now. One
// goroutine calls it at each [Checker.Changed] and at each heartbeat. Its cost follows the number
// of changes; about once a second it visits all targets.
func (checker *Checker) Evaluate(now time.Time) Evaluation {
	checker.mu.Lock()
	stalled := checker.forgive(now)
	overdue := checker.scan(now)
	checker.settle(now)
	result := Evaluation{Synced: checker.synced, Stalled: stalled}
	for key := range checker.dirty {
		was, known := checker.reported[key]
		if target := checker.streams[key.Stream][key]; target != nil {
			if is := target.reportedAs(); !known || is != was {
				checker.reported[key] = is
				result.Changed = append(result.Changed, target.health())
			}
		} else if known {
			delete(checker.reported, key)
			result.Removed = append(result.Removed, key)
		}
	}
	clear(checker.dirty)
	checker.mu.Unlock()
	if len(overdue) > 0 {
		checker.Log.Warn("checks are overdue", "targets", len(overdue), "first", overdue[0].Name, "stream", overdue[0].Stream)
	}
	return result
}

// forgive moves deadlines by the time for which this process stalled: its checks stalled, too.
// It returns that time. Between two calls of Evaluate at most Heartbeat counts, which bounds the
// time until a target without checks is overdue in a process that stalls again and again.
func (checker *Checker) forgive(now time.Time) (late time.Duration) {
	by := checker.evaluateBy
	checker.evaluateBy = now.Add(checker.Heartbeat)
	if checker.Heartbeat > 0 && !by.IsZero() && now.Sub(by) > starvedAfter {
		late = now.Sub(by)
		for _, edit := range checker.edits {
			edit.ends = edit.ends.Add(late)
		}
		for entry := range checker.entries {
			// A check may have ended since the stall.
			if moved := entry.alive.Add(late); moved.Before(now) {
				entry.alive = moved
			} else if entry.alive.Before(now) {
				entry.alive = now
			}
		}
	}
	return late
}

// scan finds the targets that became overdue. Checks only move deadlines into the future, so no
// target becomes overdue before scanAt.
func (checker *Checker) scan(now time.Time) (found []Key) {
	if checker.scanAt.IsZero() || now.Before(checker.scanAt) {
		return nil
	}
	// The loop below finds the next deadline again.
	checker.scanAt = time.Time{}
	for entry := range checker.entries {
		switch {
		case entry.overdue:
		case now.After(entry.deadline()):
			entry.overdue, entry.Since = true, now
			checker.judge(entry, now)
			checker.dirty[entry.Key] = struct{}{}
			found = append(found, entry.Key)
		default:
			checker.expect(entry)
		}
	}
	return found
}

// entries yields the checks of all targets, with those that edits replaced.
func (checker *Checker) entries(yield func(*entry) bool) {
	for _, targets := range checker.streams {
		for _, target := range targets {
			for ; target != nil; target = target.before {
				for _, entry := range target.members {
					if !yield(entry) {
						return
					}
				}
			}
		}
	}
}

// List returns the state of all targets as of the last Evaluate, sorted.
func (checker *Checker) List() []Health {
	checker.mu.Lock()
	var list []Health
	for _, targets := range checker.streams {
		for _, target := range targets {
			list = append(list, target.health())
		}
	}
	checker.mu.Unlock()
	slices.SortFunc(list, func(a, b Health) int { return a.Compare(b.Key) })
	return list
}

// finish applies the outcome of a check and schedules the next.
func (checker *Checker) finish(p probe, outcome outcome, now time.Time) {
	before, after, complain := checker.apply(p, outcome, now)
	if complain {
		checker.Log.Error("checks cannot run, the targets become overdue if this lasts", "error", outcome.reason)
	}
	checker.logChange("target changed", before.target, after.target)
	if p.plan.name != "" {
		checker.logChange("check changed", before.check, after.check, "check", p.plan.name)
	}
}

func (checker *Checker) logChange(message string, before, after Health, attributes ...any) {
	if before.State == after.State {
		return
	}
	level := slog.LevelInfo
	if before.State == Starting && after.State == Ready {
		level = slog.LevelDebug // normal at each start, for thousands of targets
	}
	attributes = append(attributes, "stream", after.Stream, "target", after.Name, "address", after.Addr,
		"from", before.State.String(), "to", after.State.String(), "error", after.LastError)
	checker.Log.Log(context.Background(), level, message, attributes...)
}

// verdicts is the health of a target and of one of its checks.
type verdicts struct{ target, check Health }

func (entry *entry) verdicts() verdicts {
	own := entry.Health
	own.State = entry.state()
	return verdicts{entry.of.own(), own}
}

func (checker *Checker) apply(probe probe, outcome outcome, now time.Time) (before, after verdicts, complain bool) {
	checker.mu.Lock()
	defer checker.mu.Unlock()
	if checker.running == checker.maxConcurrent {
		latest.Wake(checker.rescheduled) // the loop waits for this place
	}
	checker.running--
	entry := probe.entry
	if entry.removed || outcome.verdict == cancelled {
		return before, before, false
	}
	before = entry.verdicts()
	first := !entry.judged
	delete(checker.waiting, entry)
	// At a failure that is noticed late the answer may have waited for this process, or had no time to
	// arrive. It is not counted, and the check is repeated: that failure counts, however late.
	late := now.Sub(probe.began) > probe.plan.Timeout+starvedAfter
	if outcome.verdict == failed && late && !entry.starved && !entry.overdue {
		outcome.verdict, outcome.reason = starved, entry.LastError
	}
	entry.starved = outcome.verdict == starved
	if probe.vip {
		outcome = checker.examine(probe, outcome, now)
	}
	entry.LastError, entry.Deferred = outcome.reason, outcome.verdict == deferred
	switch outcome.verdict {
	case notRun:
		if complain = now.Sub(checker.complained) >= complainEvery; complain {
			checker.complained = now
		}
	case deferred, unrouted, starved:
		// No verdict, but the check was attempted in time: the target is not overdue.
		entry.alive = now
		checker.expect(entry)
	default:
		entry.count(outcome.verdict == succeeded)
		entry.LastCheck, entry.Took, entry.alive, entry.overdue = now, now.Sub(probe.began), now, false
		checker.expect(entry)
		checker.judge(entry, now)
	}
	after = entry.verdicts()
	if after.check.State != before.check.State {
		entry.Since = now
	}
	if after.check.State != before.check.State || after.check.Deferred != before.check.Deferred {
		checker.dirty[entry.Key] = struct{}{}
		latest.Wake(checker.changed)
	}
	others := len(checker.schedule) + checker.running
	entry.due = entry.next(probe.began, now, checker.epoch, first, others < fewTargets)
	switch {
	case outcome.verdict == deferred:
		entry.due = now.Add(min(failedRecheck, entry.interval()))
	case outcome.verdict == unrouted && probe.routings != checker.routings, // a fwmark may have been added since
		outcome.verdict == starved:
		entry.due = now
	case outcome.verdict == unrouted:
		entry.due = now.Add(entry.interval())
		checker.waiting[entry] = struct{}{}
	}
	heap.Push(&checker.schedule, entry)
	if entry.index == 0 {
		latest.Wake(checker.rescheduled)
	}
	return before, after, complain
}
