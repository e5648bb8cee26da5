package frontend

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// confirmTimeout bounds how long a report of WITHDRAWN waits until the gateway sessions show it,
// and the detection time of static gateways.
const confirmTimeout = 500 * time.Millisecond

// reporter reports advertisements to the load balancer: ANNOUNCED and DEPREFERRED at once,
// WITHDRAWN, on which it stops forwarding, only after the gateways have processed the withdrawal.
type reporter struct {
	announcer *latest.Value[announce.State]
	confirm   func(context.Context) error // waits until the gateway sessions export the announced VIPs
	// shared returns an error if static gateways of a family send traffic of a VIP that is
	// withdrawn.
	shared    func(vip.Family) error
	detection func() time.Duration // in which static gateways notice that BFD is down
	settle    time.Duration
	// send must not block. mu is held: reports keep their order, and idle follows the last of them.
	send func(map[vip.VIP]reported)

	mu      sync.Mutex
	pending map[vip.VIP]withdrawal // decided, not yet reported
	// attracted holds withdrawals that were reported while static gateways sent traffic of the VIP.
	// They are reported once more with the first withdrawal of the family after which none does.
	attracted map[vip.VIP]gate.Decision
	wake      chan struct{}
	idle      *latest.Value[bool] // pending is empty
}

// reported is the report of one VIP.
type reported struct {
	gate.Decision
	Unconfirmed bool
}

// withdrawal is a decision that is not confirmed yet.
type withdrawal struct {
	decision gate.Decision
	revision uint64
}

func newReporter(a *latest.Value[announce.State], s *bird.Supervisor, settle time.Duration,
	send func(map[vip.VIP]reported),
) *reporter {
	return &reporter{
		announcer: a, settle: settle, send: send,
		confirm: func(ctx context.Context) error {
			announced := a.Load()
			s.Expect(announced.Announced4, announced.Announced6)
			return s.Confirm(ctx)
		},
		shared: func(vip.Family) error { return nil }, detection: func() time.Duration { return 0 },
		pending: map[vip.VIP]withdrawal{}, attracted: map[vip.VIP]gate.Decision{}, wake: make(chan struct{}, 1),
		idle: latest.New(true),
	}
}

func (r *reporter) String() string { return "reporter" }

// decided reports a batch of decisions, or queues its withdrawals.
func (r *reporter) decided(d decisions) {
	now := map[vip.VIP]reported{}
	r.mu.Lock()
	for _, ch := range d.Changes {
		w, isPending := r.pending[ch.VIP]
		switch {
		case ch.To.Advertisement == gate.Withdrawn && ch.From.Advertisement != gate.Withdrawn:
			r.pending[ch.VIP] = withdrawal{ch.To, d.Revision}
		case ch.To.Advertisement == gate.Withdrawn && isPending:
			// Only the reason changed: the UPDATE to confirm is still the same.
			r.pending[ch.VIP] = withdrawal{ch.To, w.revision}
		default:
			_, attracted := r.attracted[ch.VIP]
			if attracted = attracted && ch.To.Advertisement == gate.Withdrawn; attracted {
				r.attracted[ch.VIP] = ch.To
			}
			delete(r.pending, ch.VIP)
			now[ch.VIP] = reported{ch.To, attracted}
		}
		if ch.To.Advertisement != gate.Withdrawn || ch.To.Reason == gate.NotConfigured {
			delete(r.attracted, ch.VIP)
		}
	}
	r.send(now)
	r.idle.Set(len(r.pending) == 0)
	r.mu.Unlock()
	latest.Wake(r.wake)
}

// Run confirms withdrawals until ctx ends.
func (r *reporter) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.wake:
			for r.confirmPending(ctx) {
			}
		}
	}
}

// confirmPending confirms the pending withdrawals, and reports whether more were added meanwhile.
func (r *reporter) confirmPending(ctx context.Context) bool {
	r.mu.Lock()
	batch := maps.Clone(r.pending)
	r.mu.Unlock()
	if len(batch) == 0 {
		return false
	}
	var revision uint64
	for _, w := range batch {
		revision = max(revision, w.revision)
	}
	confirmed := r.awaitWithdrawn(ctx, revision)
	if backoff.Sleep(ctx, r.settle) != nil {
		return false
	}
	reports := map[vip.VIP]reported{}
	var shared, families [len(vip.Families)]bool
	for _, f := range vip.Families {
		shared[f] = r.shared(f) != nil
	}
	r.mu.Lock()
	for v, w := range batch {
		families[v.Family()] = true
		// A VIP that was announced and withdrawn again meanwhile has a later revision, and is
		// confirmed in the next call.
		if current, isPending := r.pending[v]; isPending && current.revision == w.revision {
			reports[v] = reported{current.decision, !confirmed || shared[v.Family()]}
			delete(r.pending, v)
			if shared[v.Family()] && current.decision.Reason != gate.NotConfigured {
				r.attracted[v] = current.decision
			}
		}
	}
	if confirmed {
		r.reportAttracted(reports, families, shared)
	}
	more := len(r.pending) > 0
	if !more {
		// A map never shrinks: iterating over it would stay slow after a burst.
		r.pending = map[vip.VIP]withdrawal{}
	}
	r.send(reports)
	r.idle.Set(!more)
	r.mu.Unlock()
	return more
}

// reportAttracted adds the earlier withdrawals of families with a new one that static gateways no
// longer attract.
func (r *reporter) reportAttracted(reports map[vip.VIP]reported, families, shared [len(vip.Families)]bool) {
	for v, decision := range r.attracted {
		if f := v.Family(); families[f] && !shared[f] {
			reports[v] = reported{Decision: decision}
			delete(r.attracted, v)
		}
	}
}

// awaitWithdrawn waits for the revision and the sessions, and reports whether both were observed.
func (r *reporter) awaitWithdrawn(ctx context.Context, revision uint64) bool {
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout+r.detection())
	defer cancel()
	err := r.announcer.Wait(ctx, func(s announce.State) bool {
		// BIRD dropped all VIPs with the loopback session.
		return !s.Established || s.Written >= revision
	})
	return err == nil && r.confirm(ctx) == nil
}

// Flush waits until every decision was reported.
func (r *reporter) Flush(ctx context.Context) error {
	return r.idle.Wait(ctx, func(idle bool) bool { return idle })
}
