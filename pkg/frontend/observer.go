package frontend

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// decisions is one batch of the gate. It must not be modified.
type decisions struct {
	At       time.Time
	Revision uint64
	Position readiness.Position // of the load balancer
	Changes  []gate.Change
}

// input is a report of the readiness source, a batch of decisions, or a position up to which all
// decisions were queued. A merged input has all of them, and applies the report first.
type input struct {
	reported journal.Delta
	decisions
	applied *readiness.Position
}

func (in input) len() int { return in.reported.Len() + len(in.Changes) }

// merge returns one input with the newest report and decision of each VIP. It loses only events.
func merge(queue []input) (merged input, lost int) {
	newest := map[vip.VIP]gate.Change{}
	var reports []journal.Delta
	for _, in := range queue {
		reports = append(reports, in.reported)
		if in.applied != nil {
			merged.applied = in.applied
		}
		if len(in.Changes) == 0 {
			continue
		}
		merged.decisions = in.decisions
		for _, ch := range in.Changes {
			if older, ok := newest[ch.VIP]; ok {
				// The merged change spans both, so a VIP that flapped back has no transition.
				ch.From = older.From
				lost++
			}
			newest[ch.VIP] = ch
		}
	}
	merged.Changes, merged.reported = slices.Collect(maps.Values(newest)), journal.MergeDeltas(reports)
	return merged, lost
}

type lbState struct {
	Position                readiness.Position
	Service                 string // of the gRPC service that supplied the state
	Freshness               gate.Freshness
	Open, Synced, GoingAway bool
	Held                    string // removals of targets that the load balancer holds
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

// observer keeps the state for status, and records transitions. It never blocks the controller.
type observer struct {
	log         *slog.Logger
	journal     *journal.Journal
	onDecisions func(decisions)          // called with every batch that was applied to state
	onApplied   func(readiness.Position) // called after onDecisions for all decisions up to a position
	causes      causes
	sourceName  string // of the readiness source in logs and events

	queue *journal.Queue[input]
	state *state
	lb    *latest.Value[lbState] // written by the controller only
	lease atomic.Pointer[lease]
	// policies are in force; written by the controller only.
	policies atomic.Pointer[policy.Policies]
}

// newObserver returns an observer without VIPs. count counts the VIPs of a batch with the same
// transition, and known reports whether a VIP is configured.
func newObserver(log *slog.Logger, instance string, count func(journal.Transition, int), known func(vip.VIP) bool,
) *observer {
	o := &observer{
		log: log, onDecisions: func(decisions) {}, onApplied: func(readiness.Position) {},
		causes: causes{
			reason: func(gate.Reason, vip.Family) string { return "" }, shared: func(vip.Family) string { return "" },
		},
		sourceName: loadBalancer, queue: journal.NewQueue(input.len, merge),
		state: &state{changed: latest.New(uint64(0))}, lb: latest.New(lbState{}),
	}
	o.journal = journal.New(journal.Options{
		Log: log, Instance: instance, Count: count,
		Known: func(v vip.VIP) bool { return known(v) || o.state.has(v) },
	})
	o.lease.Store(&lease{})
	o.policies.Store(&policy.Policies{})
	return o
}

func (o *observer) String() string { return "observer" }

// note records an event of the frontend itself.
func (o *observer) note(detail string) { o.journal.Note(detail) }

// decided queues a batch. It does not block.
func (o *observer) decided(d decisions) { o.queue.Add(input{decisions: d}) }

// positionApplied queues a position after all decisions that depend on it. It does not block.
func (o *observer) positionApplied(position readiness.Position) {
	o.queue.Add(input{applied: &position})
}

// updated queues an update of the readiness source. It does not block.
func (o *observer) updated(u readiness.Update) {
	o.lease.Store(&lease{End: u.LeaseEnd, LastMessage: u.LastMessage})
	is := lbState{
		Position: u.Position, Service: u.Service, Freshness: o.lb.Load().Freshness,
		Open: u.Open, Synced: u.Synced, GoingAway: u.GoingAway, Held: u.Held,
		Err: u.Err,
	}
	// A heartbeat does not change the state and must not wake a goroutine.
	if !o.lb.Load().equal(is) {
		o.lb.Set(is)
	}
	if reported := (journal.Delta{Changed: u.Changed, Removed: u.Removed, Complete: u.Complete}); u.Complete ||
		reported.Len() > 0 {
		o.queue.Add(input{reported: reported})
	}
}

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
			// The last decisions explain the end of the process.
			o.drain()
			return ctx.Err()
		case <-lbChanged:
			o.queue.Settle(ctx, journal.UpdateDelay) // the loop checks ctx
			was := lb
			lb, lbChanged = o.lb.Get()
			o.logLBState(was, lb)
		case <-o.queue.Wake():
			o.queue.Settle(ctx, journal.UpdateDelay)
			o.drain()
		}
	}
}

// logLBState logs and records a transition of the readiness source.
func (o *observer) logLBState(was, is lbState) {
	// A load balancer that is replaced during an upgrade may serve the other protocol.
	if was.Service != is.Service {
		detail := "load balancer of vipgate: a state for each VIP, by " + is.Service
		if sharesState(is.Service) {
			detail = "load balancer of Meridio: one state for all VIPs, by " + is.Service
		}
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
	case o.sourceName == loadBalancer || logs.Text(was.Err) == logs.Text(is.Err):
		return
	case is.Err != nil: // a directory stays live with files that cannot be read
		o.log.Warn(o.sourceName+" degraded", "error", is.Err)
		o.note(o.sourceName + ": " + is.Err.Error())
		return
	default:
		o.log.Info(o.sourceName + " recovered")
		o.note(o.sourceName + " recovered")
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

// drain applies the queued inputs.
func (o *observer) drain() {
	if o.queue.Drain(o.apply) {
		o.state.changed.Update(func(n uint64) uint64 { return n + 1 })
	}
}

func (o *observer) apply(queue []input, lost int) {
	if lost > 0 {
		o.log.Warn("events merged: rate exceeds logging", "count", lost)
		o.note(fmt.Sprintf("%d earlier changes were merged into the following ones: rate exceeds logging", lost))
	}
	var applied *readiness.Position
	for revisions := range journal.Revisions(queue, func(in input) (journal.Delta, readiness.Position, bool) {
		return in.reported, in.Position, len(in.Changes) > 0
	}) {
		changed, last := 0, decisions{}
		for _, in := range revisions {
			// A decision follows from the reports before it, and its detail comes from them.
			if in.reported.Complete || in.reported.Len() > 0 {
				o.state.applyReadiness(in.reported)
			}
			if in.applied != nil {
				applied = in.applied
			}
			if changed += len(in.Changes); len(in.Changes) > 0 {
				last = in.decisions
			}
		}
		if changed == 0 {
			continue
		}
		changes, causes := o.journal.Begin(changed), o.causes
		causes.policies = o.policies.Load().Lookup()
		for _, in := range revisions {
			if len(in.Changes) > 0 {
				o.state.applyDecisions(in.decisions, causes, changes)
				// Report to the load balancer first: a log line may wait for a slow reader.
				o.onDecisions(in.decisions)
			}
		}
		o.journal.Record(last.At, last.Position, changes)
	}
	if applied != nil {
		o.onApplied(*applied)
	}
}

// waitWithdrawn waits until no VIP is advertised.
func (o *observer) waitWithdrawn(ctx context.Context) error {
	// Check idle first: then state contains every decision.
	return o.state.changed.Wait(ctx, func(uint64) bool { return o.queue.Idle() && o.state.advertised() == 0 })
}

// streamProblem returns why the readiness source supplies no valid readiness, or "".
func (p *process) streamProblem(lb lbState) string {
	lastMessage := p.observer.lease.Load().LastMessage
	if p.directory == nil {
		return lbProblem(lb, lastMessage)
	}
	l := p.reader.Value().Load()
	switch {
	case lb.Freshness == gate.Live && (!l.Gone || l.Everything):
		return ""
	case l.Gone:
		return l.Err.Error()
	case lastMessage.IsZero():
		return "readiness directory " + p.Directory.Path + " not read yet"
	}
	return fmt.Sprintf("readiness directory %s was last read %v ago: "+
		"its file system hangs, or the node is starved of CPU",
		p.Directory.Path, time.Since(lastMessage).Round(time.Second))
}
