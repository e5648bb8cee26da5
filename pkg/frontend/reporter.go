package frontend

import (
	"context"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// confirmTimeout is how long a report of WITHDRAWN waits for the gateways'
// sessions to show it (design section 4).
const confirmTimeout = 500 * time.Millisecond

// reporter tells the load balancer what is advertised. ANNOUNCED and
// DEPREFERRED are told at once. WITHDRAWN is told only after the UPDATE was
// written, every gateway session showed it, and the gateways had time to change
// their forwarding tables: the load balancer tears down on that word.
type reporter struct {
	announcer *latest.Value[announce.State]
	confirm   func(context.Context) error // the gateways hold what was announced
	settle    time.Duration
	// send must not block. It is called with mu held: what is told keeps the
	// order of the decisions, and idle is true only once everything was told.
	send  func(map[vip.VIP]reported)
	ready chan struct{}

	mu      sync.Mutex
	waiting map[vip.VIP]withdrawal // decided, not yet told
	wake    chan struct{}
	idle    *latest.Value[bool] // nothing waits
}

// reported is what the load balancer is told of a VIP.
type reported struct {
	gate.Decision
	Unconfirmed bool
}

// withdrawal is a decision that waits to be confirmed.
type withdrawal struct {
	decision gate.Decision
	revision uint64
}

func newReporter(a *latest.Value[announce.State], s *bird.Supervisor, settle time.Duration, send func(map[vip.VIP]reported)) *reporter {
	return &reporter{
		announcer: a, settle: settle, send: send, ready: make(chan struct{}),
		confirm: func(ctx context.Context) error {
			announced := a.Load()
			s.Expect(announced.Announced4, announced.Announced6)
			return s.Confirm(ctx)
		},
		waiting: map[vip.VIP]withdrawal{}, wake: make(chan struct{}, 1), idle: latest.New(true),
	}
}

func (r *reporter) String() string         { return "reporter" }
func (r *reporter) Ready() <-chan struct{} { return r.ready }

// decided takes over a batch of decisions.
func (r *reporter) decided(d decisions) {
	now := map[vip.VIP]reported{}
	r.mu.Lock()
	for _, ch := range d.Changes {
		w, waits := r.waiting[ch.VIP]
		switch {
		case ch.To.Advertisement != gate.Withdrawn, ch.From.Advertisement == gate.Withdrawn && !waits:
		case ch.From.Advertisement == gate.Withdrawn:
			// Only the reason changed: it is still the same UPDATE that counts.
			r.waiting[ch.VIP] = withdrawal{ch.To, w.revision}
			continue
		default:
			r.waiting[ch.VIP] = withdrawal{ch.To, d.Revision}
			continue
		}
		delete(r.waiting, ch.VIP)
		now[ch.VIP] = reported{Decision: ch.To}
	}
	r.send(now)
	r.idle.Set(len(r.waiting) == 0)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run confirms withdrawals until ctx ends.
func (r *reporter) Run(ctx context.Context) error {
	close(r.ready)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.wake:
			for r.round(ctx) {
			}
		}
	}
}

// round confirms what waits now. It tells whether more came meanwhile.
func (r *reporter) round(ctx context.Context) bool {
	r.mu.Lock()
	batch := make(map[vip.VIP]withdrawal, len(r.waiting))
	var revision uint64
	for v, w := range r.waiting {
		batch[v] = w
		revision = max(revision, w.revision)
	}
	r.mu.Unlock()
	if len(batch) == 0 {
		return false
	}
	confirmed := r.withdrawn(ctx, revision)
	timer := time.NewTimer(r.settle)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return false
	}
	told := map[vip.VIP]reported{}
	r.mu.Lock()
	for v, w := range batch {
		// A VIP that rose and fell again meanwhile has a later revision and
		// waits for a round of its own.
		if current, waits := r.waiting[v]; waits && current.revision == w.revision {
			told[v] = reported{current.decision, !confirmed}
			delete(r.waiting, v)
		}
	}
	more := len(r.waiting) > 0
	if !more {
		// A map costs what it once held: the next flip must not pay for a flood.
		r.waiting = map[vip.VIP]withdrawal{}
	}
	r.send(told)
	r.idle.Set(!more)
	r.mu.Unlock()
	return more
}

// withdrawn waits until the revision was written to BIRD and every session
// exports what it should. It tells whether that was seen.
func (r *reporter) withdrawn(ctx context.Context, revision uint64) bool {
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	for {
		s, changed := r.announcer.Get()
		if !s.Established {
			// BIRD lost our session and with it every route of ours.
			break
		}
		if s.Written >= revision {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
	return r.confirm(ctx) == nil
}

// Flush waits until nothing waits to be told.
func (r *reporter) Flush(ctx context.Context) error {
	for {
		idle, changed := r.idle.Get()
		if idle {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
