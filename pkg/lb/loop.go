package lb

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// beatsPerLease is how many heartbeats go into one lease (docs/architecture.md#the-two-leases).
const beatsPerLease = 5

// loop evaluates readiness: it is the only one that renews the lease, so that a
// load balancer that can no longer evaluate stops vouching.
type loop struct {
	config  *latest.Value[trench.Loaded]
	sources *sources
	subnets []netip.Prefix // where targets may be
	checker *healthcheck.Checker
	index   *targetset.Index
	table   *readiness.Table
	lease   time.Duration
	log     *slog.Logger
	observe func(readiness.Decision) // must not block
	event   func(event)              // must not block; nil: no events
	// files are written for others to read; nil: none are.
	files *readinessfile.Writer
	// forwarding tells the data plane what to do; nil: there is none.
	forwarding *forwarding
	away       *latest.Value[bool] // true once the load balancer stops
	// settle bounds the wait for first verdicts.
	settle  time.Duration
	outages *outage.Detector
	outage  atomic.Bool
	ready   chan struct{}

	lastRun atomic.Int64 // when it last evaluated, as time since started

	started   time.Time
	aggregate *aggregate
	before    map[vip.VIP]readiness.State
	synced    bool
	// compared says that the data plane knows what is in the kernel, or why it
	// cannot know.
	compared bool
	// wrote says that the readiness files have said everything once, leaving that
	// they say nothing any more.
	wrote, leaving bool
	outageNext     time.Time
	settleNext     time.Time
	generation     uint64 // of the configuration in force
}

func (l *loop) String() string         { return "readiness loop" }
func (l *loop) Ready() <-chan struct{} { return l.ready }

// idle is how long ago the loop last evaluated. Only after Ready.
func (l *loop) idle() time.Duration { return time.Since(l.started) - time.Duration(l.lastRun.Load()) }

// Run evaluates until ctx ends.
func (l *loop) Run(ctx context.Context) error {
	l.aggregate, l.before, l.started = newAggregate(l.outages), map[vip.VIP]readiness.State{}, time.Now()
	l.aggregate.settle = l.settle
	var confirmed, compared, reported <-chan struct{}
	var state dataplane.State
	if l.forwarding != nil {
		l.aggregate.kernel = &kernelView{patient: l.forwarding.patient}
		state, confirmed = l.forwarding.plane.State().Get()
		compared = l.forwarding.plane.Ready()
	}
	beat := time.NewTicker(l.lease / beatsPerLease)
	defer beat.Stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	loaded, reloaded := l.config.Get()
	away, stopping := l.away.Get()
	first := l.load(loaded)
	if l.forwarding != nil {
		first.kernel = &state
	}
	l.evaluate(first)
	l.sources.publish()
	close(l.ready)
	for {
		next := earlier(earlier(l.sources.next, l.outageNext), l.settleNext)
		if l.forwarding != nil {
			next, reported = earlier(next, l.forwarding.next), l.forwarding.reported
		}
		if !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		var in input
		beats, left := false, false
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-reloaded:
			loaded, reloaded = l.config.Get()
			in = l.load(loaded)
		case <-l.sources.registry.Changed():
			in.targets = true
		case <-l.sources.drains.Changed():
			in.targets = true
		case <-l.checker.Changed():
		case <-compared:
			l.compared, compared = true, nil
			in.kernel = new(l.forwarding.plane.State().Load())
		case <-confirmed:
			var state dataplane.State
			state, confirmed = l.forwarding.plane.State().Get()
			in.kernel = &state
		case <-reported: // what is held back may go
		case <-stopping:
			away, stopping = l.away.Get()
			left = true
		case <-timer.C:
		case <-beat.C:
			beats = true
		}
		news := l.evaluate(in)
		if !news {
			l.table.Heartbeat()
		}
		if beats {
			l.sources.publish()
		}
		if l.files != nil {
			if left && away { // withdraw first, and forward on
				l.leaving = true
				l.files.Want(nil)
			}
			l.files.Beat()
		}
	}
}

// load says what a reading of the trench file brings. One that was refused may
// come together with a good one before it, which no other input reports.
func (l *loop) load(x trench.Loaded) input {
	in := input{targets: true, lost: x.Err}
	if x.Err == nil || x.Generation != l.generation {
		in.config = x.Config
	}
	l.generation = x.Generation
	return in
}

// input is what came since the last evaluation.
type input struct {
	config  *trench.Config   // nil: the same as before
	lost    error            // why the trench file on the disk is not in force
	targets bool             // the sources may have other targets
	kernel  *dataplane.State // nil: the same as before
}

// evaluate takes everything into account, in one decision. It reports whether it
// committed anything.
func (l *loop) evaluate(in input) bool {
	now := time.Now()
	l.lastRun.Store(int64(now.Sub(l.started)))
	touched := vip.Set{}
	var removed []vip.VIP
	var changes targetset.Changes
	var gone map[healthcheck.Key]struct{}
	if in.config != nil {
		l.sources.configure(now, in.config, l.subnets)
	}
	l.sources.missing(now, in.lost)
	if in.config != nil || in.targets || (!l.sources.next.IsZero() && !l.sources.next.After(now)) {
		changes = l.sources.update(now)
		gone = l.aggregate.keys(changes)
		if in.config != nil {
			l.checker.Configure(changes.Streams)
			touched, removed = l.aggregate.configure(now, in.config, l.sources.set.Members)
		} else {
			l.checker.Update(changes.Streams, changes.Removed)
			l.aggregate.retarget(changes.Streams, l.sources.set.Members, touched)
		}
	}
	if in.kernel != nil {
		l.aggregate.confirm(*in.kernel, touched)
		l.compared = l.compared || in.kernel.Err != nil
	}
	e := l.checker.Evaluate(now)
	l.aggregate.apply(e, touched)
	inService, out := l.aggregate.inService(e, changes, gone)
	l.detectOutage(now, inService, out, touched)
	l.settleNext = l.aggregate.settled(now, touched)
	// A target without a verdict must not keep the VIPs of all others down.
	checked := e.Synced
	if l.settle > 0 {
		checked = l.generation > 0 && l.settleNext.IsZero()
	}
	synced := checked && (l.forwarding == nil || l.compared)
	d := readiness.Decision{Changed: l.aggregate.judge(now, touched), Removed: removed, Synced: synced, At: now}
	news := l.commit(d)
	if l.forwarding != nil && l.synced {
		l.forwarding.update(now, l.aggregate)
	}
	l.write(d, in.config != nil)
	// After the decision: who lists all targets holds the index for milliseconds.
	l.publish(changes, gone, e.Changed)
	return news
}

// detectOutage asks whether the network of the targets failed instead of the targets.
func (l *loop) detectOutage(now time.Time, changed []healthcheck.Health, removed []healthcheck.Key, touched vip.Set) {
	v := l.outages.Evaluate(now, changed, removed, l.aggregate.check)
	l.outageNext = v.Next
	l.aggregate.takeOutage(v, touched)
	if was := l.outage.Swap(v.Outage); was != v.Outage {
		if v.Outage {
			l.log.Error("mass target failure: the target network appears to be down", "detail", v.Detail)
		} else {
			l.log.Info("mass target failure is over: a target answers")
		}
	}
}

// publish shows the targets of streams that changed, those whose health changed,
// and those that are gone: the keys of gone that no stream has any more. The
// address of a target that is not checked itself changes with the other one.
func (l *loop) publish(changes targetset.Changes, gone map[healthcheck.Key]struct{}, changed []healthcheck.Health) {
	var views []targetset.View
	shown := make(map[string]struct{}, len(changes.Streams))
	for _, c := range changes.Streams {
		shown[c.Name] = struct{}{}
		for _, v := range l.aggregate.views(c.Name) {
			views = append(views, v)
			delete(gone, v.Key)
		}
	}
	names := map[string]map[string]struct{}{} // by stream
	for _, h := range changed {
		if _, done := shown[h.Stream]; done {
			continue
		}
		if names[h.Stream] == nil {
			names[h.Stream] = map[string]struct{}{}
		}
		names[h.Stream][h.Name] = struct{}{}
	}
	for stream, these := range names {
		views = append(views, l.aggregate.viewsOf(stream, these)...)
	}
	l.index.Publish(views, slices.Collect(maps.Keys(gone)))
}

// write has the readiness files say what a decision changed, or all that it leaves
// when it is the first one or whole.
func (l *loop) write(d readiness.Decision, whole bool) {
	defer clear(l.aggregate.turned)
	switch {
	case l.files == nil || l.leaving || !l.synced:
		return
	case whole || !l.wrote:
		l.wrote = true
		streams, vips := l.aggregate.readyNames()
		l.files.Want(streams, vips...)
		return
	}
	names := make(map[string]bool, len(l.aggregate.turned)+len(d.Changed)+len(d.Removed))
	for stream, ready := range l.aggregate.turned {
		names[readinessfile.GroupFile(stream)] = ready
	}
	for _, v := range d.Removed {
		names[readinessfile.VIPFile(v.Prefix().Addr())] = false
	}
	for _, r := range d.Changed {
		names[readinessfile.VIPFile(r.VIP.Prefix().Addr())] = r.State == readiness.Ready
	}
	l.files.Change(names)
}

func (l *loop) commit(d readiness.Decision) bool {
	first := d.Synced && !l.synced
	l.synced = l.synced || d.Synced
	d.Synced = l.synced
	if len(d.Changed) == 0 && len(d.Removed) == 0 && !first {
		return false
	}
	revision := l.table.Commit(d)
	l.tell(d, revision, first)
	l.observe(d)
	return true
}

// maxLogged bounds the lines that one decision logs: 50 000 of them, which a new trench
// file can cause, take a busy machine longer than the lease.
const maxLogged = 1000

// tell logs each VIP that changed its state, one line each.
func (l *loop) tell(d readiness.Decision, revision uint64, first bool) {
	if first {
		l.log.Info("readiness is synced", "revision", revision)
	}
	logged := 0
	for _, r := range d.Changed {
		was, known := l.before[r.VIP]
		if known && was == r.State {
			continue
		}
		l.before[r.VIP] = r.State
		if logged++; logged > maxLogged {
			continue
		}
		from := "unknown"
		if known {
			from = was.String()
		}
		l.log.Info("VIP changed", "vip", r.VIP, "from", from, "to", r.State, "reason", reasonWord(r.Reason), "detail", r.Detail,
			"ready_targets", r.ReadyTargets, "total_targets", r.TotalTargets, "revision", revision)
		if l.event != nil {
			why := status.Explain(r.Reason).Short
			if r.Detail != "" {
				why += ": " + r.Detail
			}
			l.event(event{Time: d.At, Object: r.VIP.String(), What: r.State.String(), Detail: why})
		}
	}
	for _, v := range d.Removed {
		delete(l.before, v)
		if logged++; logged > maxLogged {
			continue
		}
		l.log.Info("VIP removed", "vip", v, "revision", revision)
		if l.event != nil {
			l.event(event{Time: d.At, Object: v.String(), What: vipRemoved})
		}
	}
	if logged > maxLogged {
		l.log.Info("more VIPs changed or were removed", "count", logged-maxLogged, "revision", revision)
	}
}

// reasonWord is a reason as logs and metric labels show it: "too_few_ready".
func reasonWord(r readinessv1.VipReason) string {
	return strings.ToLower(strings.TrimPrefix(r.String(), "VIP_REASON_"))
}
