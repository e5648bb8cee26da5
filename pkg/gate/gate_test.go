package gate

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/vip"
)

// modelChecks is the number of model runs: planted defects were found within 1 000 runs.
const modelChecks = "3000"

func TestMain(m *testing.M) {
	if checks := flag.Lookup("rapid.checks"); checks.DefValue == "100" { // no RAPID_CHECKS
		checks.DefValue = modelChecks
		if err := checks.Value.Set(modelChecks); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(m) // parses the flags
}

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
	vip6 = vip.Require("2000::1/128")
)

// fixture drives a Gate with its own clock.
type fixture struct {
	t          *testing.T
	g          *Gate
	now        time.Time
	lastUpdate LBUpdate
	changes    []Change
}

const leaseTime = time.Second

// newFixture returns a gate whose conditions hold except for the load balancer's state.
func newFixture(t *testing.T, o Options) *fixture {
	b := &fixture{t: t, g: New(o), now: time.Unix(1000, 0)}
	b.g.Configure([]vip.VIP{vipA, vipB, vip6})
	b.g.Route(vip.NewSet(vipA, vipB, vip6))
	b.gateways(true, true)
	return b
}

func (b *fixture) gateways(v4, v6 bool) {
	b.g.Gateways(Gateways{At: b.now, Up: [2]bool{v4, v6}})
	b.evaluate()
}

func (b *fixture) evaluate() { b.changes = append([]Change(nil), b.g.Evaluate(b.now)...) }

// updateLB delivers an update of a live load balancer.
func (b *fixture) updateLB(change func(*LBUpdate)) {
	u := LBUpdate{Instance: "lb-1", Live: true, LeaseEnd: b.now.Add(leaseTime), Grace: b.lastUpdate.Grace}
	change(&u)
	b.lastUpdate = u
	b.g.UpdateLB(b.now, u)
	b.evaluate()
}

func (b *fixture) setState(state vip.State, vips ...vip.VIP) {
	b.updateLB(func(u *LBUpdate) {
		for _, v := range vips {
			u.VIPs = append(u.VIPs, VIPState{VIP: v, State: state})
		}
	})
}

// advance lets time pass in a loop that is never late, with gateways polled each second and, if
// renew is set, a load balancer that renews its lease.
func (b *fixture) advance(d time.Duration, renew bool) {
	for end := b.now.Add(d); b.now.Before(end); {
		next := earlier(end, b.now.Add(200*time.Millisecond))
		if at := b.g.Deadline(b.now); !at.IsZero() && at.Before(next) {
			next = at
		}
		b.now = next
		if renew {
			b.updateLB(func(*LBUpdate) {})
		}
		b.gateways(b.g.gatewaysUp[0], b.g.gatewaysUp[1])
	}
}

func (b *fixture) want(v vip.VIP, a Advertisement, r Reason) {
	b.t.Helper()
	if got := b.g.Decision(v); got != (Decision{a, r}) {
		b.t.Fatalf("%s: %s (%s), want %s (%s)", v, got.Advertisement, got.Reason, a, r)
	}
}

func TestDecisionTable(t *testing.T) {
	tests := []struct {
		name    string
		options Options
		do      func(*fixture)
		want    Advertisement
		reason  Reason
	}{
		{
			"1 not configured",
			Options{},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.g.Configure(nil) }, Withdrawn,
			NotConfigured,
		},
		{"2 no synced data", Options{}, func(*fixture) {}, Withdrawn, LBNeverSeen},
		{"2 not ready", Options{}, func(b *fixture) { b.setState(vip.NotReady, vipA) }, Withdrawn, LBNotReady},
		{"2 absent from the first snapshot", Options{}, func(b *fixture) {
			b.updateLB(func(h *LBUpdate) { h.Complete, h.VIPs = true, []VIPState{{VIP: vipB, State: vip.Ready}} })
		}, Withdrawn, LBNotReady},
		{"2 absent from a later snapshot", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.Complete = true })
		}, Withdrawn, LBNotReady},
		{"2 removed", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.Removed = []vip.VIP{vipA} })
		}, Withdrawn, LBNotReady},
		{
			"3 no source routing",
			Options{},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.g.Route(vip.NewSet(vipB)) },
			Withdrawn, NoSourceRouting,
		},
		{
			"4 no gateway",
			Options{},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.gateways(false, true) }, Withdrawn,
			NoGateway,
		},
		{"4 session state older than 3 s", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.now = b.now.Add(MaxSessionAge)
			b.setState(vip.Ready, vipA)
		}, Withdrawn, NoGateway},
		{
			"5 lease expired",
			Options{},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.advance(leaseTime, false) },
			Withdrawn, LBLost,
		},
		{"5 stream ended", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.Live, h.EndedAt = false, b.now })
		}, Withdrawn, LBLost},
		{
			"5 kept by policy",
			Options{OnLoss: KeepOnLoss},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.advance(time.Hour, false) }, Announced, LBStale,
		},
		{
			"6 stopping",
			Options{DrainTime: time.Second},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.g.Stop(b.now) },
			Depreferred, Stopping,
		},
		{"6 drained", Options{DrainTime: time.Second}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Drain(b.now,
				vipA)
		}, Depreferred, Drained},
		{"6 load balancer stopping", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.GoingAway, h.DrainEnd = true, b.now.Add(time.Second) })
		}, Depreferred, LBDraining},
		{"6 VIP draining", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.VIPs = []VIPState{{vipA, vip.Draining, b.now.Add(time.Second)}} })
		}, Depreferred, LBDraining},
		{"6 never raises", Options{DrainTime: time.Second}, func(b *fixture) {
			b.g.Stop(b.now)
			b.evaluate()
			b.setState(vip.Ready, vipA)
		}, Withdrawn, Stopping},
		{"7 frontend stopped", Options{DrainTime: time.Second}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Stop(b.now)
			b.advance(time.Second, true)
		}, Withdrawn, Stopping},
		{"7 drained", Options{DrainTime: time.Second}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Drain(b.now, vipA)
			b.advance(time.Second, true)
		}, Withdrawn, Drained},
		{"7 VIP drained by the load balancer", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.VIPs = []VIPState{{vipA, vip.Draining, b.now.Add(time.Second)}} })
			b.advance(time.Second, true)
		}, Withdrawn, LBDraining},
		{"8 stale", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.advance(4*time.Second, false)
		}, Announced, LBStale},
		{"8 final second of the grace period", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.advance(5*time.Second, false)
		}, Depreferred, LBStale},
		{"8 never raises", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.gateways(false, true)
			b.advance(2*time.Second, false)
			b.gateways(true, true)
		}, Withdrawn, LBStale},
		{"9 flapping", Options{}, func(b *fixture) {
			for range 3 {
				b.setState(vip.NotReady, vipA)
				b.setState(vip.Ready, vipA)
			}
		}, Withdrawn, Flapping},
		{"10 ready", Options{}, func(b *fixture) { b.setState(vip.Ready, vipA) }, Announced, Ready},
		{"10 ungated", Options{Ungated: true}, func(*fixture) {}, Announced, Ready},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newFixture(t, tt.options)
			tt.do(b)
			b.evaluate()
			b.want(vipA, tt.want, tt.reason)
		})
	}
}

func TestOneVIPChanges(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA, vipB, vip6)
	b.setState(vip.NotReady, vipA)
	if len(b.changes) != 1 || b.changes[0].VIP != vipA {
		t.Fatalf("changes %v, want only %s", b.changes, vipA)
	}
	b.gateways(true, false)
	if len(b.changes) != 1 || b.changes[0].VIP != vip6 {
		t.Fatalf("changes %v, want only %s", b.changes, vip6)
	}
}

func TestLBRestartWithinGrace(t *testing.T) {
	b := newFixture(t, Options{})
	b.lastUpdate.Grace = 5 * time.Second
	b.setState(vip.Ready, vipA, vipB)
	b.updateLB(func(h *LBUpdate) { h.Live, h.EndedAt = false, b.now })
	b.want(vipA, Announced, LBStale)
	b.now = b.now.Add(time.Second)
	b.updateLB(func(h *LBUpdate) {
		h.Instance, h.Complete, h.VIPs = "lb-2", true, []VIPState{{VIP: vipA, State: vip.Ready}}
	})
	b.want(vipA, Announced, Ready)
	b.want(vipB, Withdrawn, LBNotReady)
}

func TestUnsyncedRestartKeepsGrace(t *testing.T) {
	b := newFixture(t, Options{})
	b.lastUpdate.Grace = 2 * time.Second
	b.setState(vip.Ready, vipA)
	b.updateLB(func(h *LBUpdate) { h.Live, h.EndedAt = false, b.now })
	ended := b.now
	for range 10 {
		b.updateLB(func(h *LBUpdate) { h.Live, h.EndedAt = false, ended }) // a new instance, not synced yet
		b.advance(200*time.Millisecond, false)
	}
	b.want(vipA, Withdrawn, LBLost)
}

func TestSourceRoutingOrder(t *testing.T) {
	for _, routedFirst := range []bool{true, false} {
		b := &fixture{t: t, g: New(Options{}), now: time.Unix(1000, 0)}
		routed, vips := vip.NewSet(vipA), []vip.VIP{vipA, vipB}
		if routedFirst {
			b.g.Route(routed)
			b.g.Configure(vips)
		} else {
			b.g.Configure(vips)
			b.g.Route(routed)
		}
		b.gateways(true, true)
		b.setState(vip.Ready, vipA, vipB)
		b.want(vipA, Announced, Ready)
		b.want(vipB, Withdrawn, NoSourceRouting)
	}
}

func TestLateCheckExtendsLeaseOnce(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	b.g.Configure([]vip.VIP{vipA, vipB})
	b.setState(vip.Ready, vipB)
	b.g.Route(vip.NewSet(vipA))
	b.evaluate()
	b.want(vipB, Withdrawn, NoSourceRouting)

	b.now = b.now.Add(leaseTime + 2*lateAfter)
	b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}})
	b.g.Route(vip.NewSet(vipA, vipB))
	b.evaluate()
	b.want(vipA, Announced, LBStale)
	b.want(vipB, Withdrawn, LBStale)

	if at := b.g.Deadline(b.now); !at.Equal(b.now.Add(lateAfter)) {
		t.Fatalf("next deadline after %v, want %v", at.Sub(b.now), lateAfter)
	}
	b.now = b.now.Add(lateAfter + 2*lateAfter)
	b.evaluate()
	b.want(vipA, Withdrawn, LBLost)

	b.setState(vip.Ready, vipA)
	b.want(vipA, Announced, Ready)
}

func TestPunctualCheckEndsLease(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	b.now = b.now.Add(leaseTime)
	b.evaluate()
	b.want(vipA, Withdrawn, LBLost)
}

func TestExpiredSessionsStayDown(t *testing.T) {
	b := newFixture(t, Options{})
	at := b.now
	b.now = at.Add(MaxSessionAge)
	b.setState(vip.Ready, vipA)
	b.want(vipA, Withdrawn, NoGateway)
	// The lease was seen to expire in time: a late check of the same state does not extend it.
	b.now = b.now.Add(2 * lateAfter)
	b.g.Gateways(Gateways{At: at, Up: [2]bool{true, true}})
	b.setState(vip.Ready, vipA)
	b.want(vipA, Withdrawn, NoGateway)
}

func TestLateCheckExtendsSessionsOnce(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	b.now = b.now.Add(MaxSessionAge + 2*lateAfter)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Announced, Ready)
	b.now = b.g.Deadline(b.now)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Withdrawn, NoGateway)
}

func TestChangeAfterLeaseIsNoFlap(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	for range 3 {
		b.advance(leaseTime, false)
		b.want(vipA, Withdrawn, LBLost)
		b.setState(vip.NotReady, vipA)
		b.setState(vip.Ready, vipA)
		b.want(vipA, Announced, Ready)
	}
}

func TestEarlierDrainDecides(t *testing.T) {
	for _, tt := range []struct {
		lb, operator time.Duration
		reason       Reason
	}{
		{time.Second, 2 * time.Second, LBDraining},
		{2 * time.Second, time.Second, Drained},
	} {
		b := newFixture(t, Options{DrainTime: tt.operator})
		b.setState(vip.Ready, vipA)
		end := b.now.Add(tt.lb)
		b.g.Drain(b.now, vipA)
		away := func(h *LBUpdate) { h.GoingAway, h.DrainEnd = true, end }
		b.updateLB(away)
		b.want(vipA, Depreferred, tt.reason)
		b.now = b.now.Add(time.Second - time.Millisecond)
		b.updateLB(away)
		b.want(vipA, Depreferred, tt.reason)
		b.now = b.now.Add(time.Millisecond)
		b.updateLB(away)
		b.want(vipA, Withdrawn, tt.reason)
	}
}

func TestGraceStart(t *testing.T) {
	for name, after := range map[string]time.Duration{
		"stream ends first":   leaseTime / 2,
		"lease expires first": leaseTime * 3 / 2,
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, Options{})
			b.lastUpdate.Grace = 2 * time.Second
			b.setState(vip.Ready, vipA)
			began := b.now
			lease := b.lastUpdate.LeaseEnd
			b.advance(after, false)
			b.updateLB(func(h *LBUpdate) { h.Live, h.LeaseEnd, h.EndedAt = false, lease, b.now })
			lost := began.Add(min(after, leaseTime) + b.lastUpdate.Grace)
			b.advance(lost.Sub(b.now)-time.Millisecond, false)
			b.want(vipA, Depreferred, LBStale)
			b.advance(time.Millisecond, false)
			b.want(vipA, Withdrawn, LBLost)
		})
	}
}

func TestFlapBackoff(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	for i, want := range []time.Duration{0, 1, 2, 4, 8, 16} {
		b.setState(vip.NotReady, vipA)
		b.setState(vip.Ready, vipA)
		start := b.now
		for b.g.Decision(vipA).Advertisement != Announced {
			b.want(vipA, Withdrawn, Flapping)
			b.advance(100*time.Millisecond, true)
		}
		if got := b.now.Sub(start); got != want*time.Second {
			t.Fatalf("flap %d: rise delayed by %v, want %v", i+1, got, want*time.Second)
		}
	}
	b.advance(flapWindow+time.Second, true)
	b.setState(vip.NotReady, vipA)
	b.setState(vip.Ready, vipA)
	b.want(vipA, Announced, Ready)
}

func TestOtherCausesAreNoFlaps(t *testing.T) {
	b := newFixture(t, Options{DrainTime: time.Second})
	b.setState(vip.Ready, vipA)
	for range 5 {
		b.gateways(false, false)
		b.gateways(true, true)
		b.advance(2*leaseTime, false)
		b.setState(vip.Ready, vipA)
		b.g.Drain(b.now, vipA)
		b.advance(2*time.Second, true)
		b.want(vipA, Withdrawn, Drained)
		b.g.Undrain(vipA)
		b.evaluate()
		b.updateLB(func(h *LBUpdate) { h.Instance, h.Complete = b.now.String(), true })
		b.setState(vip.Ready, vipA)
	}
	b.want(vipA, Announced, Ready)
}

func TestUnusedVIPsAreRemoved(t *testing.T) {
	b := newFixture(t, Options{})
	b.g.Configure(nil)
	b.setState(vip.Ready, vipA, vipB)
	b.updateLB(func(h *LBUpdate) { h.Removed = []vip.VIP{vipA, vipB} })
	if len(b.g.vips)+len(b.g.entries) != 0 {
		t.Fatalf("%d VIPs are still stored, %d entries", len(b.g.vips), len(b.g.entries))
	}
}

func TestEvaluateAllocatesNothing(t *testing.T) {
	b := newFixture(t, Options{})
	states := []VIPState{{VIP: vipA}, {VIP: vipB}, {VIP: vip6}}
	flip := func() {
		for i := range states {
			states[i].State = vip.Ready - states[i].State
		}
		b.g.UpdateLB(b.now, LBUpdate{Instance: "lb-1", Live: true, LeaseEnd: b.now.Add(leaseTime), VIPs: states})
		if n := len(b.g.Evaluate(b.now)); n != len(states) {
			t.Fatalf("%d changes", n)
		}
		b.now = b.now.Add(2 * maxFlapWait)
		b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}})
	}
	for range 20 { // flaps and slices have reached their size
		flip()
	}
	if n := testing.AllocsPerRun(100, flip); n != 0 {
		t.Errorf("%v allocations for %d changes", n, len(states))
	}
}
