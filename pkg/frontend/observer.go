package frontend

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxQueued bounds the queued changes; beyond that, events are merged and the loss is counted. It
// also bounds the queued readiness reports, which are merged without loss.
const maxQueued = 200_000

// bookkeepingDelay delays logs, events, reports and BIRD commands after a decision. Without it,
// they compete for the processor and for BIRD, and delay the UPDATE of a flip by 0.2 to 0.4 ms.
// BIRD sends the UPDATE within 0.3 ms.
const bookkeepingDelay = time.Millisecond

// decisions is one batch of the gate. It must not be modified.
type decisions struct {
	At       time.Time
	Revision uint64
	Position readiness.Position // of the load balancer
	Changes  []gate.Change
}

// lbState is the state of the readiness source.
type lbState struct {
	Position                readiness.Position
	Service                 string // of the gRPC service that supplied the state
	Freshness               gate.Freshness
	Open, Synced, GoingAway bool
	Err                     error
}

// equal compares errors by their text, since not every error type is comparable.
func (s lbState) equal(t lbState) bool {
	text := logs.Text(s.Err) == logs.Text(t.Err)
	s.Err, t.Err = nil, nil
	return text && s == t
}

// lease is the validity of the readiness. Each heartbeat extends it.
type lease struct{ End, LastMessage time.Time }

// loadBalancer is the name of the default readiness source.
const loadBalancer = "load balancer"

// observer keeps the state for status, and logs transitions. It never blocks the controller.
type observer struct {
	log         *slog.Logger
	count       func(t transition, vips int) // counts the VIPs of a batch with the same transition
	onDecisions func(decisions)              // called with every batch that was applied to state
	onApplied   func(readiness.Position)     // called after onDecisions for all decisions up to a position
	causes      causes
	sourceName  string // of the readiness source in logs and events

	mu   sync.Mutex
	busy bool // decisions are being applied
	pending
	wake chan struct{}

	state *state
	lb    *latest.Value[lbState] // written by the controller only
	lease atomic.Pointer[lease]
}

// pending holds the queued inputs that are not applied to state yet.
type pending struct {
	queue    []decisions
	queued   int // changes in queue
	dropped  uint64
	applied  *readiness.Position // nil if onApplied was called with the newest position
	reported []reportedVIPs
	reports  int // VIPs in reported
}

func newObserver(log *slog.Logger, count func(t transition, vips int)) *observer {
	o := &observer{
		log: log, count: count, onDecisions: func(decisions) {}, onApplied: func(readiness.Position) {},
		causes: causes{
			reason: func(gate.Reason, vip.Family) string { return "" }, shared: func(vip.Family) string { return "" },
		},
		sourceName: loadBalancer, wake: make(chan struct{}, 1),
		state: &state{changed: latest.New(uint64(0))}, lb: latest.New(lbState{}),
	}
	o.lease.Store(&lease{})
	return o
}

func (o *observer) String() string { return "observer" }

// decided queues a batch. It does not block.
func (o *observer) decided(d decisions) {
	o.mu.Lock()
	if o.queued > maxQueued {
		o.compact()
	}
	o.queue = append(o.queue, d)
	o.queued += len(d.Changes)
	o.mu.Unlock()
	latest.Wake(o.wake)
}

// positionApplied queues a position after all decisions that depend on it. It does not block.
func (o *observer) positionApplied(position readiness.Position) {
	o.mu.Lock()
	o.applied = &position
	o.mu.Unlock()
	latest.Wake(o.wake)
}

// compact merges the queue into the newest decision of each VIP. It loses events but no state.
func (o *observer) compact() {
	newest := map[vip.VIP]gate.Change{}
	for _, d := range o.queue {
		for _, ch := range d.Changes {
			if older, ok := newest[ch.VIP]; ok {
				ch.From = older.From
			}
			newest[ch.VIP] = ch
		}
	}
	merged := o.queue[len(o.queue)-1]
	merged.Changes = slices.Collect(maps.Values(newest))
	o.dropped += uint64(o.queued - len(merged.Changes))
	o.queue, o.queued = []decisions{merged}, len(merged.Changes)
}

// updated queues an update of the readiness source. It does not block.
func (o *observer) updated(u readiness.Update) {
	changed := len(u.Changed)+len(u.Removed) > 0 || u.Complete
	if changed {
		o.mu.Lock()
		o.queueReported(reportedVIPs{u.Changed, u.Removed, u.Complete})
		o.mu.Unlock()
	}
	o.lease.Store(&lease{End: u.LeaseEnd, LastMessage: u.LastMessage})
	is := lbState{
		Position: u.Position, Service: u.Service, Freshness: o.lb.Load().Freshness,
		Open: u.Open, Synced: u.Synced, GoingAway: u.GoingAway, Err: u.Err,
	}
	// A heartbeat does not change the state and must not wake a goroutine.
	if !o.lb.Load().equal(is) {
		o.lb.Set(is)
	}
	if changed {
		latest.Wake(o.wake)
	}
}

// queueReported queues a report of the readiness source.
func (o *observer) queueReported(r reportedVIPs) {
	if r.complete {
		o.reported, o.reports = nil, 0
	}
	o.reported = append(o.reported, r)
	if o.reports += len(r.changed) + len(r.removed); o.reports > maxQueued {
		o.compactReported()
	}
}

// compactReported merges the queued reports into the newest report of each VIP.
func (o *observer) compactReported() {
	newest := map[vip.VIP]*readiness.VIPReadiness{} // nil: removed
	for _, r := range o.reported {
		for i := range r.changed {
			newest[r.changed[i].VIP] = &r.changed[i]
		}
		for _, v := range r.removed {
			newest[v] = nil
		}
	}
	merged := reportedVIPs{complete: o.reported[0].complete}
	for v, r := range newest {
		if r == nil {
			merged.removed = append(merged.removed, v)
		} else {
			merged.changed = append(merged.changed, *r)
		}
	}
	o.reported, o.reports = []reportedVIPs{merged}, len(newest)
}

// freshness stores the freshness of the readiness.
func (o *observer) freshness(f gate.Freshness) {
	if o.lb.Load().Freshness != f {
		o.lb.Update(func(s lbState) lbState { s.Freshness = f; return s })
	}
}

// Run applies queued inputs until ctx ends.
func (o *observer) Run(ctx context.Context) error {
	lb, lbChanged := o.lb.Get()
	for {
		select {
		case <-ctx.Done():
			o.drain()
			return ctx.Err()
		case <-lbChanged:
			_ = backoff.Sleep(ctx, bookkeepingDelay) // the loop checks ctx
			was := lb
			lb, lbChanged = o.lb.Get()
			o.logLBState(was, lb)
		case <-o.wake:
			_ = backoff.Sleep(ctx, bookkeepingDelay)
			o.drain()
		}
	}
}

// logLBState logs and records a transition of the readiness source.
func (o *observer) logLBState(was, is lbState) {
	if was.Service != is.Service {
		detail := serviceDetail(is.Service)
		o.log.Info("readiness protocol changed", "service", is.Service, "detail", detail)
		o.note(detail)
	}
	var what string
	switch {
	case was.Freshness != is.Freshness:
		what = o.sourceName + " readiness went from " + was.Freshness.String() + " to " + is.Freshness.String()
	case is.GoingAway && !was.GoingAway:
		what = o.sourceName + " is stopping"
	case was.Position.InstanceID != is.Position.InstanceID:
		what = "new " + o.sourceName + " instance"
	case o.sourceName != loadBalancer && logs.Text(was.Err) != logs.Text(is.Err):
		if is.Err != nil {
			o.log.Warn(o.sourceName+" degraded", "error", is.Err)
			o.note(o.sourceName + ": " + is.Err.Error())
			return
		}
		o.log.Info(o.sourceName + " recovered")
		o.note(o.sourceName + " recovered")
		return
	default:
		return
	}
	attrs := []any{"instance_id", is.Position.InstanceID, "revision", is.Position.Revision}
	if is.Err != nil && is.Freshness != gate.Live {
		attrs = append(attrs, "error", is.Err)
		what += ": " + is.Err.Error()
	}
	o.log.Info(what, attrs...)
	o.note(what)
}

// note records an event of the frontend itself.
func (o *observer) note(detail string) { o.record(event{Detail: detail}) }

// record records an event with the current time.
func (o *observer) record(e event) {
	e.Time = time.Now()
	o.state.mu.Lock()
	o.state.events.add(e)
	o.state.mu.Unlock()
	o.state.changed.Update(func(n uint64) uint64 { return n + 1 })
}

func (o *observer) drain() {
	o.mu.Lock()
	p := o.pending
	o.pending = pending{}
	o.busy = len(p.queue) > 0
	o.mu.Unlock()
	if len(p.queue) == 0 && len(p.reported) == 0 && p.applied == nil {
		return
	}
	defer func() {
		o.mu.Lock()
		o.busy = false
		o.mu.Unlock()
		o.state.changed.Update(func(n uint64) uint64 { return n + 1 })
	}()
	o.state.applyReadiness(p.reported)
	if p.dropped > 0 {
		o.log.Warn("events merged: rate exceeds logging", "count", p.dropped)
		o.note(fmt.Sprintf("%d earlier changes were merged into the following ones: rate exceeds logging", p.dropped))
	}
	for _, d := range p.queue {
		debug := o.log.Enabled(context.Background(), slog.LevelDebug)
		out := o.state.applyDecisions(d, o.causes, debug)
		o.onDecisions(d)
		for _, t := range out.tally.List() {
			o.count(t.Transition, t.Count)
		}
		o.logDecisions(d, out, debug)
	}
	if p.applied != nil {
		o.onApplied(*p.applied)
	}
}

// logDecisions logs a line for each changed advertisement, or one common line if more than
// status.MaxSingle changed. With debug, it logs every VIP.
func (o *observer) logDecisions(d decisions, out outcome, debug bool) {
	level := slog.LevelInfo
	if changed := out.changed(); changed > status.MaxSingle {
		level = slog.LevelDebug
		o.log.With(status.LogAttributes(changed, out.bulk.transitions(true), out.bulk.first(true))...).Info("VIPs changed",
			"instance_id", d.Position.InstanceID, "revision", d.Position.Revision)
	}
	for _, e := range out.changes {
		o.log.Log(context.Background(), level, "VIP changed", "vip", e.VIP, "from", shown(e.From),
			"to", shown(e.To), "reason", e.To.Reason, "instance_id", e.Position.InstanceID,
			"revision", e.Position.Revision, "detail", e.Detail)
	}
	if !debug {
		return
	}
	for _, ch := range d.Changes {
		if !transitionOf(ch).changed() {
			o.log.Debug("VIP reason changed", "vip", ch.VIP, "advertisement", shown(ch.To),
				"from", ch.From.Reason, "to", ch.To.Reason,
				"instance_id", d.Position.InstanceID, "revision", d.Position.Revision)
		}
	}
}

// waitWithdrawn waits until no VIP is advertised.
func (o *observer) waitWithdrawn(ctx context.Context) error {
	// Check idle first: then state contains every decision.
	return o.state.changed.Wait(ctx, func(uint64) bool { return o.idle() && o.state.advertised() == 0 })
}

// idle reports whether every decision was applied and onDecisions has returned.
func (o *observer) idle() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.queue) == 0 && !o.busy
}
