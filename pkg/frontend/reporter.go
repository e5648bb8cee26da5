package frontend

import (
	"context"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
)

// confirmTimeout bounds the time that a report of WITHDRAWN waits for the gateway sessions, in
// addition to the detection time of static gateways.
const confirmTimeout = 500 * time.Millisecond

// reporter reports advertisements to the load balancer. It reports ANNOUNCED and DEPREFERRED
// immediately, but WITHDRAWN only after the gateways have processed the withdrawal, because the
// load balancer then stops forwarding.
type reporter struct {
	announcer *latest.Value[announce.State]
	confirm   func(context.Context) error // waits until the gateway sessions export the announced VIPs
	// shared returns an error if static gateways of a family send the traffic of withdrawn VIPs.
	shared    func(vip.Family) error
	detection func() time.Duration // in which static gateways notice that BFD is down
	settle    time.Duration
	// send must not block. It is called with mu held, so that reports keep their order and idle is
	// set after the last report.
	send func([]reported)

	mu      sync.Mutex
	pending vip.Table[withdrawal] // includes entries that no longer wait
	waiting int                   // number of waiting entries in pending
	// attracted holds withdrawals that were reported while static gateways sent traffic of the VIP.
	// They are reported again with the next withdrawal of the family after which no static gateway
	// sends traffic.
	attracted map[vip.VIP]gate.Decision
	rounds    []*round // that settle, the oldest first; of the goroutine of Run
	wake      chan struct{}
	idle      *latest.Value[bool] // true while no withdrawal waits
}

type reported struct {
	VIP vip.VIP
	gate.Decision
	Unconfirmed bool
}

// withdrawal is a decision that waits for confirmation by the gateway sessions.
type withdrawal struct {
	decision gate.Decision
	waits    bool // false once it was reported, or once the VIP is advertised again
	revision uint64
	round    *round // nil before its confirmation begins
}

// round holds withdrawals with one confirmation.
type round struct {
	confirmed bool
	families  [len(vip.Families)]bool
	settled   time.Time
}

func newReporter(a *latest.Value[announce.State], s bgpSpeaker, settle time.Duration,
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

// withdraws reports whether a change withdraws the VIP. A new reason of a withdrawn one does not.
func withdraws(ch gate.Change) bool {
	return ch.To.Advertisement == gate.Withdrawn && ch.From.Advertisement != gate.Withdrawn
}

// decided reports a batch of decisions and queues its withdrawals for confirmation.
func (r *reporter) decided(d decisions) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Add all withdrawals in one batch: each growth of the table sorts it.
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
			*w = withdrawal{ch.To, true, d.Revision, nil}
		case ch.To.Advertisement == gate.Withdrawn && isPending:
			// Only the reason changed; the UPDATE to confirm is the same.
			w.decision = ch.To
		default:
			// A new reason of a VIP whose traffic static gateways still send stays unconfirmed.
			_, attracted := r.attracted[ch.VIP]
			if attracted = attracted && ch.To.Advertisement == gate.Withdrawn; attracted {
				r.attracted[ch.VIP] = ch.To
			}
			if isPending {
				// The VIP is advertised again, so its withdrawal needs no confirmation.
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
	// Run confirms the withdrawals in its goroutine, because a confirmation waits for BIRD.
	latest.Wake(r.wake)
}

// Run confirms and reports withdrawals until ctx ends. The settle times of rounds overlap: a
// withdrawal does not wait for that of an earlier one.
func (r *reporter) Run(ctx context.Context) error {
	for {
		var settled <-chan time.Time
		if len(r.rounds) > 0 {
			settled = time.After(time.Until(r.rounds[0].settled))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.wake:
			r.confirmPending(ctx)
		case <-settled:
			r.reportSettled()
		}
	}
}

// confirmPending begins a round with the pending withdrawals, if there are any.
func (r *reporter) confirmPending(ctx context.Context) {
	var revision uint64
	next := &round{}
	// One confirmation covers all waiting withdrawals, so it waits for their newest revision. mu is
	// released during the wait: new decisions must not block.
	r.mu.Lock()
	for v, w := range r.pending.All() {
		if w.waits && w.round == nil {
			w.round, next.families[v.Family()], revision = next, true, max(revision, w.revision)
		}
	}
	r.mu.Unlock()
	if next.families != (round{}).families {
		next.confirmed = r.awaitWithdrawn(ctx, revision)
		next.settled = time.Now().Add(r.settle)
		r.rounds = append(r.rounds, next)
	}
}

// reportSettled reports the withdrawals of the oldest round.
func (r *reporter) reportSettled() {
	var shared [len(vip.Families)]bool
	done := r.rounds[0]
	r.rounds = r.rounds[1:]
	for _, f := range vip.Families {
		shared[f] = r.shared(f) != nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	reports := make([]reported, 0, r.waiting)
	for v, w := range r.pending.All() {
		// A VIP that was announced and withdrawn again has a later round.
		if !w.waits || w.round != done {
			continue
		}
		reports = append(reports, reported{v, w.decision, !done.confirmed || shared[v.Family()]})
		w.waits = false
		r.waiting--
		if shared[v.Family()] && w.decision.Reason != gate.NotConfigured {
			r.attracted[v] = w.decision
		}
	}
	// Without a confirmation, static gateways may still send traffic.
	if done.confirmed {
		reports = r.reportAttracted(reports, done.families, shared)
	}
	if r.waiting == 0 {
		r.pending = vip.Table[withdrawal]{} // frees the memory, which grew with the largest decision
	} else {
		r.pending.DeleteFunc(func(_ vip.VIP, w *withdrawal) bool { return !w.waits })
	}
	r.send(reports)
	r.idle.Set(r.waiting == 0)
}

// reportAttracted adds earlier withdrawals whose traffic static gateways no longer send, for
// families with a new withdrawal.
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

// awaitWithdrawn waits until the announcer has written the revision and the gateway sessions
// confirm it. It reports whether both happened in time.
func (r *reporter) awaitWithdrawn(ctx context.Context, revision uint64) bool {
	ctx, cancel := task.WithAwakeTimeout(ctx, confirmTimeout+r.detection())
	defer cancel()
	err := r.announcer.Wait(ctx, func(s announce.State) bool {
		// BIRD drops all VIPs when the loopback session ends.
		return !s.Established || s.Written >= revision
	})
	return err == nil && r.confirm(ctx) == nil
}

// Flush waits until every decision is reported.
func (r *reporter) Flush(ctx context.Context) error {
	return r.idle.Wait(ctx, func(idle bool) bool { return idle })
}
