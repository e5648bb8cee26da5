package frontend

import (
	"context"
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
	send func([]reported)

	mu      sync.Mutex
	pending vip.Table[withdrawal] // decided, not yet reported, and some that no longer wait
	waiting int                   // of pending
	// attracted holds withdrawals that were reported while static gateways sent traffic of the VIP.
	// They are reported once more with the first withdrawal of the family after which none does.
	attracted map[vip.VIP]gate.Decision
	wake      chan struct{}
	idle      *latest.Value[bool] // no withdrawal waits
}

// reported is the report of one VIP.
type reported struct {
	VIP vip.VIP
	gate.Decision
	Unconfirmed bool
}

// withdrawal is a decision that is not confirmed yet.
type withdrawal struct {
	decision gate.Decision
	waits    bool // false: it was reported, or the VIP is advertised again
	revision uint64
}

func newReporter(a *latest.Value[announce.State], s *bird.Supervisor, settle time.Duration,
	send func([]reported),
) *reporter {
	return &reporter{
		announcer: a, settle: settle, send: send,
		confirm: func(ctx context.Context) error {
			announced := a.Load()
			s.Expect(announced.Announced4, announced.Announced6)
			return s.Confirm(ctx)
		},
		shared: func(vip.Family) error { return nil }, detection: func() time.Duration { return 0 },
		attracted: map[vip.VIP]gate.Decision{}, wake: make(chan struct{}, 1), idle: latest.New(true),
	}
}

func (r *reporter) String() string { return "reporter" }

// withdraws reports whether a change is a withdrawal, and not only another reason of one.
func withdraws(ch gate.Change) bool {
	return ch.To.Advertisement == gate.Withdrawn && ch.From.Advertisement != gate.Withdrawn
}

// decided reports a batch of decisions, or queues its withdrawals.
func (r *reporter) decided(d decisions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending.Add(func(yield func(vip.VIP) bool) {
		for i := range d.Changes {
			if withdraws(d.Changes[i]) && !yield(d.Changes[i].VIP) {
				return
			}
		}
	})
	var now []reported
	for i, ch := range d.Changes {
		w := r.pending.Next(ch.VIP)
		isPending := w != nil && w.waits
		switch {
		case withdraws(ch):
			if !isPending {
				r.waiting++
			}
			*w = withdrawal{ch.To, true, d.Revision}
		case ch.To.Advertisement == gate.Withdrawn && isPending:
			// Only the reason changed: the UPDATE to confirm is still the same.
			w.decision = ch.To
		default:
			_, attracted := r.attracted[ch.VIP]
			if attracted = attracted && ch.To.Advertisement == gate.Withdrawn; attracted {
				r.attracted[ch.VIP] = ch.To
			}
			if isPending {
				w.waits = false
				r.waiting--
			}
			if now == nil {
				now = make([]reported, 0, len(d.Changes)-i)
			}
			now = append(now, reported{ch.VIP, ch.To, attracted})
		}
		if ch.To.Advertisement != gate.Withdrawn || ch.To.Reason == gate.NotConfigured {
			delete(r.attracted, ch.VIP)
		}
	}
	r.send(now)
	r.idle.Set(r.waiting == 0)
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
	var revision uint64
	var shared, families [len(vip.Families)]bool
	r.mu.Lock()
	waiting := r.waiting
	for v, w := range r.pending.All() {
		if w.waits {
			revision = max(revision, w.revision)
			families[v.Family()] = true
		}
	}
	r.mu.Unlock()
	if waiting == 0 {
		return false
	}
	confirmed := r.awaitWithdrawn(ctx, revision)
	if backoff.Sleep(ctx, r.settle) != nil {
		return false
	}
	for _, f := range vip.Families {
		shared[f] = r.shared(f) != nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	reports := make([]reported, 0, waiting)
	for v, w := range r.pending.All() {
		// A VIP that was announced and withdrawn again meanwhile has a later revision, and is
		// confirmed in the next call.
		if !w.waits || w.revision > revision {
			continue
		}
		reports = append(reports, reported{v, w.decision, !confirmed || shared[v.Family()]})
		w.waits = false
		r.waiting--
		if shared[v.Family()] && w.decision.Reason != gate.NotConfigured {
			r.attracted[v] = w.decision
		}
	}
	if confirmed {
		reports = r.reportAttracted(reports, families, shared)
	}
	if r.waiting == 0 {
		r.pending = vip.Table[withdrawal]{} // with its memory, which is that of the largest decision
	} else {
		r.pending.DeleteFunc(func(_ vip.VIP, w *withdrawal) bool { return !w.waits })
	}
	r.send(reports)
	r.idle.Set(r.waiting == 0)
	return r.waiting > 0
}

// reportAttracted adds the earlier withdrawals of families with a new one that static gateways no
// longer attract.
func (r *reporter) reportAttracted(
	reports []reported, families, shared [len(vip.Families)]bool,
) []reported {
	for v, decision := range r.attracted {
		if f := v.Family(); families[f] && !shared[f] {
			reports = append(reports, reported{VIP: v, Decision: decision})
			delete(r.attracted, v)
		}
	}
	return reports
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
