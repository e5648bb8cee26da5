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

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxQueued bounds the decisions that wait to be shown. The observer keeps up
// with thousands of flips per second; beyond that events are dropped and
// counted, never the state itself.
const maxQueued = 200_000

// decisions is one batch as the gate made it.
type decisions struct {
	At         time.Time
	Revision   uint64
	Instance   string
	LBRevision uint64
	Changes    []gate.Change
}

// vipState is what is known of one VIP.
type vipState struct {
	Decision gate.Decision
	Since    time.Time // of the advertisement
	Revision uint64    // of the decision
	Word     readiness.VIPReadiness
	Spoken   bool // Word holds something
}

// lbState is what is known of the load balancer.
type lbState struct {
	InstanceID string
	Revision   uint64
	Freshness  gate.Freshness
	Open       bool
	Synced     bool
	GoingAway  bool
	Err        error
}

// same compares errors by what they say: not every error can be compared.
func (s lbState) same(t lbState) bool {
	text := errorText(s.Err) == errorText(t.Err)
	s.Err, t.Err = nil, nil
	return text && s == t
}

// lease is what each heartbeat moves on.
type lease struct{ End, LastMessage time.Time }

// loadBalancer is what usually says whether VIPs are ready.
const loadBalancer = "load balancer"

// observer shows what the controller does: it keeps the state for status and
// metrics, logs transitions and remembers events. The controller only appends to
// its queue, so that it never waits for a log or a scrape.
type observer struct {
	log     *slog.Logger
	metrics transitionMetrics
	// onDecisions is told of every batch after it was taken over.
	onDecisions func(decisions)
	// onApplied is told of the load balancer's position once every decision that
	// rests on it, or on what came before, was handed to onDecisions.
	onApplied func(readiness.Position)
	// why says in words what is behind the reason of VIPs of a family; empty if
	// nothing is known.
	why func(gate.Reason, vip.Family) string
	// speaker is who says whether VIPs are ready, for people.
	speaker string
	ready   chan struct{}

	mu      sync.Mutex
	queue   []decisions
	queued  int  // changes in queue
	busy    bool // decisions are being taken over
	applied readiness.Position
	moved   bool // applied was not told yet
	dropped uint64
	words   map[vip.VIP]readiness.VIPReadiness // not yet taken over
	gone    vip.Set
	whole   bool // words replace everything
	wake    chan struct{}

	state *state
	lb    *latest.Value[lbState] // written by the controller only
	lease atomic.Pointer[lease]
}

// transitionMetrics is what the observer counts.
type transitionMetrics interface {
	Transition(to, reason string)
}

// state is the picture of all VIPs, for readers that may take their time.
type state struct {
	mu      sync.RWMutex
	vips    map[vip.VIP]vipState
	events  events
	changed *latest.Value[uint64]
}

func newObserver(log *slog.Logger, m transitionMetrics) *observer {
	o := &observer{
		log: log, metrics: m, onDecisions: func(decisions) {}, onApplied: func(readiness.Position) {},
		why: func(gate.Reason, vip.Family) string { return "" }, speaker: loadBalancer, ready: make(chan struct{}),
		words: map[vip.VIP]readiness.VIPReadiness{}, gone: vip.Set{}, wake: make(chan struct{}, 1),
		state: &state{vips: map[vip.VIP]vipState{}, changed: latest.New(uint64(0))},
		lb:    latest.New(lbState{}),
	}
	o.lease.Store(&lease{})
	return o
}

func (o *observer) String() string         { return "observer" }
func (o *observer) Ready() <-chan struct{} { return o.ready }

// decided queues a batch. It does not block.
func (o *observer) decided(d decisions) {
	o.mu.Lock()
	if o.queued > maxQueued {
		o.compact()
	}
	o.queue = append(o.queue, d)
	o.queued += len(d.Changes)
	o.mu.Unlock()
	o.poke()
}

// took notes that the gate has applied what the load balancer said up to a
// position, and that its decisions were queued. It does not block.
func (o *observer) took(position readiness.Position) {
	o.mu.Lock()
	o.applied, o.moved = position, true
	o.mu.Unlock()
	o.poke()
}

// compact makes one batch of all that wait, with the newest decision of each
// VIP: the state stays right, and what is given up are events.
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

// heard queues the load balancer's words. It does not block.
func (o *observer) heard(u readiness.Update) {
	o.mu.Lock()
	if u.Complete {
		o.whole = true
		clear(o.words)
		clear(o.gone)
	}
	for v, r := range u.Changed {
		o.words[v] = r
		delete(o.gone, v)
	}
	for v := range u.Removed {
		o.gone[v] = struct{}{}
		delete(o.words, v)
	}
	o.mu.Unlock()
	o.lease.Store(&lease{End: u.LeaseEnd, LastMessage: u.LastMessage})
	is := lbState{
		InstanceID: u.Position.InstanceID, Revision: u.Position.Revision, Freshness: o.lb.Load().Freshness,
		Open: u.Open, Synced: u.Synced, GoingAway: u.GoingAway, Err: u.Err,
	}
	// A heartbeat says nothing new and wakes nobody.
	if !o.lb.Load().same(is) {
		o.lb.Set(is)
	}
	if len(u.Changed)+len(u.Removed) > 0 || u.Complete {
		o.poke()
	}
}

// freshness notes how much the load balancer's word is worth.
func (o *observer) freshness(f gate.Freshness) {
	if o.lb.Load().Freshness != f {
		o.lb.Update(func(s lbState) lbState { s.Freshness = f; return s })
	}
}

func (o *observer) poke() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Run takes over what was queued until ctx ends.
func (o *observer) Run(ctx context.Context) error {
	close(o.ready)
	lb, lbChanged := o.lb.Get()
	for {
		select {
		case <-ctx.Done():
			o.drain()
			return ctx.Err()
		case <-lbChanged:
			was := lb
			lb, lbChanged = o.lb.Get()
			o.tellLB(was, lb)
		case <-o.wake:
			o.drain()
		}
	}
}

// tellLB logs and remembers what happened to the load balancer's word as a whole.
func (o *observer) tellLB(was, is lbState) {
	var what string
	switch {
	case was.Freshness != is.Freshness:
		what = o.speaker + "'s word went from " + was.Freshness.String() + " to " + is.Freshness.String()
	case is.GoingAway && !was.GoingAway:
		what = o.speaker + " goes away"
	case was.InstanceID != is.InstanceID:
		what = "another " + o.speaker + " instance speaks"
	case o.speaker != loadBalancer && errorText(was.Err) != errorText(is.Err):
		if is.Err == nil {
			o.log.Info(o.speaker + " is as it should be again")
			o.remark(o.speaker + " is as it should be again")
			return
		}
		o.log.Warn(o.speaker+" is not as it should be", "error", is.Err)
		o.remark(o.speaker + ": " + is.Err.Error())
		return
	default:
		return
	}
	attrs := []any{"instance_id", is.InstanceID, "revision", is.Revision}
	if is.Err != nil && is.Freshness != gate.Live {
		attrs = append(attrs, "error", is.Err)
		what += ": " + is.Err.Error()
	}
	o.log.Info(what, attrs...)
	o.remark(what)
}

// remark remembers an event of the frontend as a whole.
func (o *observer) remark(detail string) { o.remember(event{Detail: detail}) }

// remember remembers an event that happened now.
func (o *observer) remember(e event) {
	e.Time = time.Now()
	o.state.mu.Lock()
	o.state.events.add(e)
	o.state.mu.Unlock()
	o.state.changed.Update(func(n uint64) uint64 { return n + 1 })
}

func (o *observer) drain() {
	o.mu.Lock()
	queue, words, gone, whole, dropped := o.queue, o.words, o.gone, o.whole, o.dropped
	o.queue, o.queued, o.whole, o.dropped = nil, 0, false, 0
	o.busy = len(queue) > 0
	applied, moved := o.applied, o.moved
	o.moved = false
	o.words, o.gone = map[vip.VIP]readiness.VIPReadiness{}, vip.Set{}
	o.mu.Unlock()
	if len(queue) == 0 && len(words) == 0 && len(gone) == 0 && !whole && !moved {
		return
	}
	defer func() {
		o.mu.Lock()
		o.busy = false
		o.mu.Unlock()
		o.state.changed.Update(func(n uint64) uint64 { return n + 1 })
	}()
	o.state.takeWords(words, gone, whole)
	if dropped > 0 {
		o.log.Warn("events were merged because they came faster than they could be logged", "count", dropped)
		o.remark(fmt.Sprintf("%d changes before this were merged into those that follow: they came faster than they could be told", dropped))
	}
	for _, d := range queue {
		for _, e := range o.state.takeDecisions(d, o.why) {
			o.tell(e)
		}
		o.onDecisions(d)
	}
	if moved {
		o.onApplied(applied)
	}
}

func (o *observer) tell(e event) {
	if e.From.Advertisement == e.To.Advertisement {
		o.log.Debug("VIP's reason changed", "vip", e.VIP, "advertisement", e.To.Advertisement, "from", e.From.Reason, "to", e.To.Reason,
			"instance_id", e.Instance, "revision", e.Revision)
		return
	}
	o.metrics.Transition(e.To.Advertisement.String(), e.To.Reason.String())
	o.log.Info("VIP changed", "vip", e.VIP, "from", e.From.Advertisement, "to", e.To.Advertisement, "reason", e.To.Reason,
		"instance_id", e.Instance, "revision", e.Revision, "detail", e.Detail)
}

func (s *state) takeWords(words map[vip.VIP]readiness.VIPReadiness, gone vip.Set, whole bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if whole {
		for v, st := range s.vips {
			st.Word, st.Spoken = readiness.VIPReadiness{}, false
			s.vips[v] = st
		}
	}
	// Otherwise the cost is that of what was said, never of all VIPs: it is paid
	// with every decision.
	for v := range gone {
		if st, known := s.vips[v]; known {
			st.Word, st.Spoken = readiness.VIPReadiness{}, false
			s.vips[v] = st
		}
	}
	for v, r := range words {
		st := s.vips[v]
		st.Word, st.Spoken = r, true
		s.vips[v] = st
	}
}

// takeDecisions takes over a batch and returns the events it makes.
func (s *state) takeDecisions(d decisions, why func(gate.Reason, vip.Family) string) []event {
	s.mu.Lock()
	defer s.mu.Unlock()
	made := make([]event, 0, len(d.Changes))
	// Asked once for all VIPs of a batch, which may be many.
	type cause struct {
		reason gate.Reason
		family vip.Family
	}
	known := map[cause]string{}
	for _, ch := range d.Changes {
		st := s.vips[ch.VIP]
		if st.Since.IsZero() || ch.From.Advertisement != ch.To.Advertisement {
			st.Since = d.At
		}
		st.Decision, st.Revision = ch.To, d.Revision
		if ch.To.Reason == gate.NotConfigured && !st.Spoken {
			delete(s.vips, ch.VIP)
		} else {
			s.vips[ch.VIP] = st
		}
		e := event{Time: d.At, VIP: ch.VIP, From: ch.From, To: ch.To, Instance: d.Instance, Revision: d.LBRevision}
		if ch.To.Reason == gate.LBNotReady || ch.To.Reason == gate.LBDraining {
			e.Detail = st.Word.Detail
		}
		if e.Detail == "" {
			c := cause{ch.To.Reason, ch.VIP.Family()}
			detail, asked := known[c]
			if !asked {
				detail = why(c.reason, c.family)
				known[c] = detail
			}
			e.Detail = detail
		}
		made = append(made, e)
		if ch.From.Advertisement != ch.To.Advertisement || ch.From.Reason == gate.NotConfigured {
			s.events.add(e)
		}
	}
	return made
}

// advertised counts the VIPs that are advertised, after everything queued
// before was taken over.
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
	for {
		_, changed := o.state.changed.Get()
		// In this order: what was decided before this look counts.
		if o.idle() && o.state.advertised() == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// idle tells whether every decision was taken over and handed to onDecisions.
func (o *observer) idle() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.queue) == 0 && !o.busy
}
