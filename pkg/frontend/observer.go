package frontend

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxQueued bounds the queued decisions; beyond that, events are dropped and counted.
const maxQueued = 200_000

// decisions is one batch of the gate.
type decisions struct {
	At       time.Time
	Revision uint64
	Position readiness.Position // of the load balancer
	Changes  []gate.Change
}

// vipState is the state of one VIP.
type vipState struct {
	Decision  gate.Decision
	Since     time.Time               // of the advertisement
	Readiness *readiness.VIPReadiness // nil: not reported
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

// lease is what each heartbeat extends.
type lease struct{ End, LastMessage time.Time }

// loadBalancer is the name of the default readiness source.
const loadBalancer = "load balancer"

// observer keeps the state for status and logs transitions. It never blocks the controller.
type observer struct {
	log          *slog.Logger
	transition   func(to, reason string)              // counts a change of an advertisement
	onDecisions  func(decisions)                      // takes every batch after it was applied to state
	onApplied    func(readiness.Position)             // follows onDecisions of every decision up to it
	reasonDetail func(gate.Reason, vip.Family) string // cause of a reason for VIPs of a family, or ""
	sharedDetail func(vip.Family) string              // added for VIPs that are not announced, or ""
	sourceName   string                               // of the readiness source in logs and events

	mu   sync.Mutex
	busy bool // decisions are being applied
	pending
	wake chan struct{}

	state *state
	lb    *latest.Value[lbState] // written by the controller only
	lease atomic.Pointer[lease]
}

// pending is what was queued and not applied to state yet.
type pending struct {
	queue     []decisions
	queued    int // changes in queue
	dropped   uint64
	applied   *readiness.Position                 // nil: onApplied was called with the newest
	readiness map[vip.VIP]*readiness.VIPReadiness // nil: removed
	complete  bool                                // readiness replaces the state of all VIPs
}

// state is the state of all VIPs and the events, for readers that must not block the controller.
type state struct {
	mu      sync.RWMutex
	vips    map[vip.VIP]vipState
	events  events
	changed *latest.Value[uint64]
}

func newObserver(log *slog.Logger, transition func(to, reason string)) *observer {
	o := &observer{
		log: log, transition: transition, onDecisions: func(decisions) {}, onApplied: func(readiness.Position) {},
		reasonDetail: func(gate.Reason, vip.Family) string { return "" }, sourceName: loadBalancer,
		sharedDetail: func(vip.Family) string { return "" },
		pending:      pending{readiness: map[vip.VIP]*readiness.VIPReadiness{}}, wake: make(chan struct{}, 1),
		state: &state{vips: map[vip.VIP]vipState{}, changed: latest.New(uint64(0))},
		lb:    latest.New(lbState{}),
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

// positionApplied queues the position up to which all decisions were queued. It does not block.
func (o *observer) positionApplied(position readiness.Position) {
	o.mu.Lock()
	o.applied = &position
	o.mu.Unlock()
	latest.Wake(o.wake)
}

// compact merges the queue into the newest decision of each VIP: events are lost, not state.
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
	o.mu.Lock()
	if u.Complete {
		o.complete = true
		clear(o.readiness)
	}
	for _, r := range u.Changed {
		o.readiness[r.VIP] = &r
	}
	for _, v := range u.Removed {
		o.readiness[v] = nil
	}
	o.mu.Unlock()
	o.lease.Store(&lease{End: u.LeaseEnd, LastMessage: u.LastMessage})
	is := lbState{
		Position: u.Position, Service: u.Service, Freshness: o.lb.Load().Freshness,
		Open: u.Open, Synced: u.Synced, GoingAway: u.GoingAway, Err: u.Err,
	}
	// A heartbeat changes nothing and wakes no goroutine.
	if !o.lb.Load().equal(is) {
		o.lb.Set(is)
	}
	if len(u.Changed)+len(u.Removed) > 0 || u.Complete {
		latest.Wake(o.wake)
	}
}

// freshness records the freshness of the readiness.
func (o *observer) freshness(f gate.Freshness) {
	if o.lb.Load().Freshness != f {
		o.lb.Update(func(s lbState) lbState { s.Freshness = f; return s })
	}
}

// Run applies what was queued until ctx ends.
func (o *observer) Run(ctx context.Context) error {
	lb, lbChanged := o.lb.Get()
	for {
		select {
		case <-ctx.Done():
			o.drain()
			return ctx.Err()
		case <-lbChanged:
			was := lb
			lb, lbChanged = o.lb.Get()
			o.logLBState(was, lb)
		case <-o.wake:
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
	o.pending = pending{readiness: map[vip.VIP]*readiness.VIPReadiness{}}
	o.busy = len(p.queue) > 0
	o.mu.Unlock()
	if len(p.queue) == 0 && len(p.readiness) == 0 && !p.complete && p.applied == nil {
		return
	}
	defer func() {
		o.mu.Lock()
		o.busy = false
		o.mu.Unlock()
		o.state.changed.Update(func(n uint64) uint64 { return n + 1 })
	}()
	o.state.applyReadiness(p.readiness, p.complete)
	if p.dropped > 0 {
		o.log.Warn("events merged: rate exceeds logging", "count", p.dropped)
		o.note(fmt.Sprintf("%d earlier changes were merged into the following ones: rate exceeds logging", p.dropped))
	}
	for _, d := range p.queue {
		for _, e := range o.state.applyDecisions(d, o.reasonDetail, o.sharedDetail) {
			o.logTransition(e)
		}
		o.onDecisions(d)
	}
	if p.applied != nil {
		o.onApplied(*p.applied)
	}
}

func (o *observer) logTransition(e event) {
	if e.From.Advertisement == e.To.Advertisement {
		o.log.Debug("VIP reason changed", "vip", e.VIP, "advertisement", e.To.Advertisement,
			"from", e.From.Reason, "to", e.To.Reason,
			"instance_id", e.Position.InstanceID, "revision", e.Position.Revision)
		return
	}
	o.transition(e.To.Advertisement.String(), e.To.Reason.String())
	o.log.Info("VIP changed", "vip", e.VIP, "from", e.From.Advertisement, "to", e.To.Advertisement,
		"reason", e.To.Reason, "instance_id", e.Position.InstanceID, "revision", e.Position.Revision,
		"detail", e.Detail)
}

func (s *state) applyReadiness(updates map[vip.VIP]*readiness.VIPReadiness, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if complete {
		for v, st := range s.vips {
			st.Readiness = nil
			s.vips[v] = st
		}
	}
	// The cost of a delta is that of its VIPs, not of all VIPs: it is paid with every decision.
	for v, r := range updates {
		if st, known := s.vips[v]; known || r != nil {
			st.Readiness = r
			s.vips[v] = st
		}
	}
}

// applyDecisions applies a batch and returns its events.
func (s *state) applyDecisions(
	d decisions, reasonDetail func(gate.Reason, vip.Family) string, sharedDetail func(vip.Family) string,
) []event {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]event, 0, len(d.Changes))
	// The detail is computed once for each reason and family of a batch, which may have many VIPs.
	type cause struct {
		reason gate.Reason
		family vip.Family
	}
	known := map[cause]string{}
	var shared [len(vip.Families)]string
	for _, f := range vip.Families {
		shared[f] = sharedDetail(f)
	}
	for _, ch := range d.Changes {
		st := s.vips[ch.VIP]
		if st.Since.IsZero() || ch.From.Advertisement != ch.To.Advertisement {
			st.Since = d.At
		}
		st.Decision = ch.To
		if ch.To.Reason == gate.NotConfigured && st.Readiness == nil {
			delete(s.vips, ch.VIP)
		} else {
			s.vips[ch.VIP] = st
		}
		e := event{Time: d.At, VIP: ch.VIP, From: ch.From, To: ch.To, Position: d.Position}
		if st.Readiness != nil && (ch.To.Reason == gate.LBNotReady || ch.To.Reason == gate.LBDraining) {
			e.Detail = st.Readiness.Detail
		}
		if e.Detail == "" {
			c := cause{ch.To.Reason, ch.VIP.Family()}
			if _, asked := known[c]; !asked {
				known[c] = reasonDetail(c.reason, c.family)
			}
			e.Detail = known[c]
		}
		if more := shared[ch.VIP.Family()]; more != "" && ch.To.Advertisement != gate.Announced {
			e.Detail = strings.TrimPrefix(e.Detail+"; "+more, "; ")
		}
		list = append(list, e)
		if ch.From.Advertisement != ch.To.Advertisement || ch.From.Reason == gate.NotConfigured {
			s.events.add(e)
		}
	}
	return list
}

// advertised returns the number of advertised VIPs.
func (s *state) advertised() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	n := 0
	for _, st := range s.vips {
		if st.Decision.Advertisement != gate.Withdrawn {
			n++
		}
	}
	return n
}

// waitWithdrawn waits until no VIP is advertised.
func (o *observer) waitWithdrawn(ctx context.Context) error {
	// In this order: a decision before idle is in state.
	return o.state.changed.Wait(ctx, func(uint64) bool { return o.idle() && o.state.advertised() == 0 })
}

// idle reports whether every decision was applied and onDecisions has returned.
func (o *observer) idle() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.queue) == 0 && !o.busy
}
