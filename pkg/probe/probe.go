package probe

import (
	"cmp"
	"container/heap"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// maxConcurrent is the maximum number of concurrent checks. If all are in use, verdicts expire.
	maxConcurrent = 4096
	// maxTraces is the maximum number of concurrent traces. A dead path is traced again after retrace,
	// or after retryTrace if no router answered.
	maxTraces  = 8
	retrace    = time.Minute
	retryTrace = 5 * time.Second
	// busyRecheck is the delay after a check that could not run, for instance as its port is in use.
	busyRecheck = 100 * time.Millisecond
	// late is how long a verdict holds beyond two intervals and the checks of a path.
	late = time.Second
)

// Options configure a Prober. Every field is required unless stated otherwise.
type Options struct {
	Log *slog.Logger
	// Interval is the time between two checks of a path that is reachable, and the rest after a check
	// of a dead one. With many paths it becomes longer, so that at most Rate checks start in a second.
	Interval time.Duration
	Timeout  time.Duration // of a check
	Fall     int           // failures in a row that make a path dead
	Rate     int
	Ports    int    // source ports toward each VIP
	First    uint16 // the first of them
	// Sources lists addresses to check from, several of a family for more paths. For a family without
	// one the kernel selects the address.
	Sources []netip.Addr
}

// Prober probes VIPs. It implements task.Task. Its methods are safe for concurrent use.
type Prober struct {
	Options
	rescheduled chan struct{} // of size 1: the first check in the schedule changed
	changed     chan struct{} // of size 1: a path has another verdict
	slots       chan struct{} // one for each concurrent check
	traces      chan struct{}
	pulse       task.Pulse

	mu       sync.Mutex
	targets  []*target
	schedule schedule
	interval time.Duration // Options.Interval, longer if there are many paths
	checking time.Duration // how long the checks of a path may take, one after the other
}

// New returns a prober without VIPs.
func New(options Options) *Prober {
	slots := maxConcurrent
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil {
		slots = int(max(1, min(maxConcurrent, limit.Cur/2)))
	}
	return &Prober{
		Options: options, interval: options.Interval, checking: options.Timeout,
		rescheduled: make(chan struct{}, 1), changed: make(chan struct{}, 1),
		slots: make(chan struct{}, slots), traces: make(chan struct{}, maxTraces),
	}
}

// String names the task.
func (prober *Prober) String() string { return "prober" }

// Overdue implements task.Loop.
func (prober *Prober) Overdue() time.Duration { return prober.pulse.Overdue() }

// Changed wakes its reader when the verdict of a path changed, or a check could not run.
func (prober *Prober) Changed() <-chan struct{} { return prober.changed }

// Update replaces the VIPs. A VIP whose checks are unchanged keeps its verdicts.
func (prober *Prober) Update(targets []Target) {
	prober.mu.Lock()
	defer prober.mu.Unlock()
	old := make(map[vip.VIP]*target, len(prober.targets))
	for _, t := range prober.targets {
		old[t.VIP] = t
	}
	prober.targets = make([]*target, 0, len(targets))
	var fresh []*path
	paths, checks := 0, 1
	for _, wanted := range targets {
		t := old[wanted.VIP]
		if t == nil || !slices.Equal(t.Checks, wanted.Checks) || t.Unchecked != wanted.Unchecked {
			t = prober.target(wanted)
			fresh = append(fresh, t.paths...)
		} else {
			delete(old, wanted.VIP)
		}
		count := 0 // checks until all have failed
		for _, check := range wanted.Checks {
			members, _ := check.Members()
			count += len(members)
		}
		paths, checks = paths+len(t.paths), max(checks, count)
		prober.targets = append(prober.targets, t)
	}
	for _, gone := range old {
		for _, path := range gone.paths {
			path.removed = true
			if path.index >= 0 {
				heap.Remove(&prober.schedule, path.index)
			}
		}
	}
	prober.interval = max(prober.Interval, time.Duration(paths)*time.Second/time.Duration(prober.Rate))
	prober.checking = time.Duration(checks) * prober.Timeout
	now := time.Now()
	for i, path := range fresh {
		path.due = now.Add(time.Duration(i) * prober.interval / time.Duration(len(fresh)))
		heap.Push(&prober.schedule, path)
	}
	latest.Wake(prober.rescheduled)
	latest.Wake(prober.changed)
}

// target returns a VIP with its paths, which are not in the schedule yet.
func (prober *Prober) target(wanted Target) *target {
	t := &target{Target: wanted, address: wanted.Address()}
	for _, check := range wanted.Checks {
		t.checks = append(t.checks, healthcheck.NewSingle(check, prober.Timeout))
	}
	if len(t.checks) == 0 {
		return t
	}
	family := wanted.VIP.Family()
	sources := slices.Clone(prober.Sources)
	sources = slices.DeleteFunc(sources, func(a netip.Addr) bool { return vip.FamilyOf(a) != family })
	if len(sources) == 0 {
		sources = []netip.Addr{{}}
	}
	for _, source := range sources {
		for i := range prober.Ports {
			t.paths = append(t.paths, &path{
				target: t, source: source, port: prober.First + uint16(i), index: -1, verdict: Unknown,
			})
		}
	}
	return t
}

// Run probes until ctx ends, and waits for the running checks.
func (prober *Prober) Run(ctx context.Context) error {
	var checks sync.WaitGroup
	defer checks.Wait()
	defer prober.pulse.End()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		path, wait := prober.take(time.Now())
		if path != nil {
			select {
			case prober.slots <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			checks.Go(func() {
				defer func() { <-prober.slots }()
				prober.probe(ctx, path)
			})
			continue
		}
		timer.Reset(wait)
		prober.pulse.Next(wait)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-prober.rescheduled:
		case <-timer.C:
		}
	}
}

// take removes the first path from the schedule if it is due, or returns how long to wait.
func (prober *Prober) take(now time.Time) (*path, time.Duration) {
	prober.mu.Lock()
	defer prober.mu.Unlock()
	if len(prober.schedule) == 0 {
		return nil, time.Minute
	}
	if wait := prober.schedule[0].due.Sub(now); wait > 0 {
		return nil, wait
	}
	return heap.Pop(&prober.schedule).(*path), 0
}

// probe checks a path, traces it if it is dead, and schedules its next check.
func (prober *Prober) probe(ctx context.Context, path *path) {
	began := time.Now()
	result := path.check(ctx)
	if ctx.Err() != nil {
		return
	}
	if prober.apply(path, result, time.Now()) {
		select {
		case prober.traces <- struct{}{}:
			hop := path.trace(ctx)
			<-prober.traces
			prober.mu.Lock()
			path.hop, path.tracedAt = hop, time.Now()
			prober.mu.Unlock()
			latest.Wake(prober.changed)
		default: // after one of the next checks
		}
	}
	prober.mu.Lock()
	defer prober.mu.Unlock()
	if path.removed {
		return
	}
	now := time.Now()
	switch {
	case result.NotRun:
		path.due = now.Add(max(busyRecheck, prober.interval/4))
	case path.verdict == Dead:
		// A rest leaves the source port to the check of another process, such as --once.
		path.due = now.Add(prober.interval)
	case !result.Passed:
		path.due = now
	default:
		path.due = began.Add(prober.interval)
	}
	heap.Push(&prober.schedule, path)
	if path.index == 0 {
		latest.Wake(prober.rescheduled)
	}
}

// apply sets the verdict of a path, and reports whether to trace it.
func (prober *Prober) apply(path *path, result healthcheck.Result, now time.Time) (trace bool) {
	prober.mu.Lock()
	defer prober.mu.Unlock()
	before, reasonBefore := path.verdict, path.notRun
	path.notRun = ""
	switch {
	case result.NotRun:
		// The verdict holds until it expires: a busy port is no reason to doubt it.
		path.notRun = result.Reason
	case result.Passed:
		path.verdict, path.judged, path.failures = Reachable, now, 0
		path.took, path.reason, path.hop, path.tracedAt = result.Took, "", "", time.Time{}
	default:
		path.failures++
		path.reason = result.Reason
		if path.failures >= prober.Fall {
			path.verdict, path.judged = Dead, now
			again := retrace
			if path.hop == "" {
				again = retryTrace
			}
			trace = now.Sub(path.tracedAt) > again && connectPort(path.target.Checks[0]) != 0
		}
	}
	if path.verdict != before || path.notRun != reasonBefore {
		latest.Wake(prober.changed)
	}
	if path.verdict != before && !path.removed && (before != Unknown || path.verdict == Dead) {
		prober.Log.Info("path changed", "vip", path.target.VIP, "source", path.from(), "state", path.verdict.String(),
			"reason", path.reason)
	}
	return trace
}

// Valid returns how long a verdict holds: each path is checked within that time.
func (prober *Prober) Valid() time.Duration {
	prober.mu.Lock()
	defer prober.mu.Unlock()
	return prober.valid()
}

// valid returns how long a verdict holds.
func (prober *Prober) valid() time.Duration { return 2*prober.interval + prober.checking + late }

// schedule is a heap of paths: the one that is due first has index 0.
type schedule []*path

func (s schedule) Len() int           { return len(s) }
func (s schedule) Less(i, j int) bool { return s[i].due.Before(s[j].due) }
func (s schedule) Swap(i, j int) {
	s[i], s[j] = s[j], s[i]
	s[i].index, s[j].index = i, j
}

func (s *schedule) Push(x any) {
	path := x.(*path)
	path.index = len(*s)
	*s = append(*s, path)
}

func (s *schedule) Pop() any {
	last := len(*s) - 1
	path := (*s)[last]
	path.index = -1
	(*s)[last] = nil
	*s = (*s)[:last]
	return path
}

func (path *path) from() string {
	at := netip.AddrPortFrom(cmp.Or(path.source, unspecified(path.target.address)), path.port)
	return at.String()
}

func unspecified(like netip.Addr) netip.Addr {
	if vip.FamilyOf(like) == vip.IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
