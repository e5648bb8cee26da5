package gate

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"go.uber.org/goleak"
)

// modelChecks is how often the model runs: defects planted in the gate took up
// to 1 000 runs to be found.
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

// bench drives a Gate with a clock of its own.
type bench struct {
	t       *testing.T
	g       *Gate
	now     time.Time
	heard   Heard
	changes []Change
}

const leaseTime = time.Second

// newBench returns a gate for which everything holds but the load balancer's word.
func newBench(t *testing.T, o Options) *bench {
	b := &bench{t: t, g: New(o), now: time.Unix(1000, 0)}
	b.g.Configure([]vip.VIP{vipA, vipB, vip6})
	b.g.Route(vip.NewSet(vipA, vipB, vip6))
	b.gateways(true, true)
	return b
}

func (b *bench) gateways(v4, v6 bool) {
	b.g.Gateways(Gateways{At: b.now, Up: [2]bool{v4, v6}})
	b.evaluate()
}

func (b *bench) evaluate() { b.changes = append([]Change(nil), b.g.Evaluate(b.now)...) }

// hear delivers what a live load balancer says.
func (b *bench) hear(change func(*Heard)) {
	h := Heard{Instance: "lb-1", Live: true, LeaseEnd: b.now.Add(leaseTime), Grace: b.heard.Grace}
	change(&h)
	b.heard = h
	b.g.Hear(b.now, h)
	b.evaluate()
}

func (b *bench) say(said Said, vips ...vip.VIP) {
	b.hear(func(h *Heard) {
		for _, v := range vips {
			h.Words = append(h.Words, Word{VIP: v, Said: said})
		}
	})
}

// sleep passes time as a punctual loop would, with gateways polled each second
// and, if beat, a load balancer that renews its lease.
func (b *bench) sleep(d time.Duration, beat bool) {
	for end := b.now.Add(d); b.now.Before(end); {
		next := earlier(end, b.now.Add(200*time.Millisecond))
		if at := b.g.Deadline(b.now); !at.IsZero() && at.Before(next) {
			next = at
		}
		b.now = next
		if beat {
			b.hear(func(*Heard) {})
		}
		b.gateways(b.g.gatewaysUp[0], b.g.gatewaysUp[1])
	}
}

func (b *bench) want(v vip.VIP, a Advertisement, r Reason) {
	b.t.Helper()
	if got := b.g.Decision(v); got != (Decision{a, r}) {
		b.t.Fatalf("%s is %s because %s, want %s because %s", v, got.Advertisement, got.Reason, a, r)
	}
}

func TestEachRowOfTheTable(t *testing.T) {
	tests := []struct {
		name    string
		options Options
		do      func(*bench)
		want    Advertisement
		reason  Reason
	}{
		{"1 not configured", Options{}, func(b *bench) { b.say(SaidReady, vipA); b.g.Configure(nil) }, Withdrawn, NotConfigured},
		{"2 never heard of", Options{}, func(*bench) {}, Withdrawn, LBNeverSeen},
		{"2 not ready", Options{}, func(b *bench) { b.say(SaidNotReady, vipA) }, Withdrawn, LBNotReady},
		{"2 absent from the first snapshot", Options{}, func(b *bench) {
			b.hear(func(h *Heard) { h.Complete, h.Words = true, []Word{{VIP: vipB, Said: SaidReady}} })
		}, Withdrawn, LBNotReady},
		{"2 absent from a later snapshot", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.hear(func(h *Heard) { h.Complete = true })
		}, Withdrawn, LBNotReady},
		{"2 removed", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.hear(func(h *Heard) { h.Removed = []vip.VIP{vipA} })
		}, Withdrawn, LBNotReady},
		{"3 no source routing", Options{}, func(b *bench) { b.say(SaidReady, vipA); b.g.Route(vip.NewSet(vipB)) }, Withdrawn, NoSourceRouting},
		{"4 no gateway", Options{}, func(b *bench) { b.say(SaidReady, vipA); b.gateways(false, true) }, Withdrawn, NoGateway},
		{"4 nothing heard of BIRD for 3 s", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.now = b.now.Add(MaxSessionAge)
			b.say(SaidReady, vipA)
		}, Withdrawn, NoGateway},
		{"5 lease over", Options{}, func(b *bench) { b.say(SaidReady, vipA); b.sleep(leaseTime, false) }, Withdrawn, LBLost},
		{"5 stream ended", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.hear(func(h *Heard) { h.Live, h.EndedAt = false, b.now })
		}, Withdrawn, LBLost},
		{"5 kept by policy", Options{OnLoss: KeepOnLoss}, func(b *bench) { b.say(SaidReady, vipA); b.sleep(time.Hour, false) }, Announced, LBStale},
		{"6 stopping", Options{DrainTime: time.Second}, func(b *bench) { b.say(SaidReady, vipA); b.g.Stop(b.now) }, Depreferred, Stopping},
		{"6 drained", Options{DrainTime: time.Second}, func(b *bench) { b.say(SaidReady, vipA); b.g.Drain(b.now, vipA) }, Depreferred, Drained},
		{"6 load balancer going away", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.hear(func(h *Heard) { h.GoingAway, h.DrainEnd = true, b.now.Add(time.Second) })
		}, Depreferred, LBDraining},
		{"6 VIP draining", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.hear(func(h *Heard) { h.Words = []Word{{vipA, SaidDraining, b.now.Add(time.Second)}} })
		}, Depreferred, LBDraining},
		{"6 never raises", Options{DrainTime: time.Second}, func(b *bench) {
			b.g.Stop(b.now)
			b.evaluate()
			b.say(SaidReady, vipA)
		}, Withdrawn, Stopping},
		{"7 stopped", Options{DrainTime: time.Second}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.g.Stop(b.now)
			b.sleep(time.Second, true)
		}, Withdrawn, Stopping},
		{"7 drained", Options{DrainTime: time.Second}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.g.Drain(b.now, vipA)
			b.sleep(time.Second, true)
		}, Withdrawn, Drained},
		{"7 VIP drained by the load balancer", Options{}, func(b *bench) {
			b.say(SaidReady, vipA)
			b.hear(func(h *Heard) { h.Words = []Word{{vipA, SaidDraining, b.now.Add(time.Second)}} })
			b.sleep(time.Second, true)
		}, Withdrawn, LBDraining},
		{"8 stale", Options{}, func(b *bench) { b.heard.Grace = 5 * time.Second; b.say(SaidReady, vipA); b.sleep(4*time.Second, false) }, Announced, LBStale},
		{"8 in the last second of the grace", Options{}, func(b *bench) { b.heard.Grace = 5 * time.Second; b.say(SaidReady, vipA); b.sleep(5*time.Second, false) }, Depreferred, LBStale},
		{"8 never raises", Options{}, func(b *bench) {
			b.heard.Grace = 5 * time.Second
			b.say(SaidReady, vipA)
			b.gateways(false, true)
			b.sleep(2*time.Second, false)
			b.gateways(true, true)
		}, Withdrawn, LBStale},
		{"9 flapping", Options{}, func(b *bench) {
			for range 3 {
				b.say(SaidNotReady, vipA)
				b.say(SaidReady, vipA)
			}
		}, Withdrawn, Flapping},
		{"10 ready", Options{}, func(b *bench) { b.say(SaidReady, vipA) }, Announced, Ready},
		{"10 without gating", Options{Ungated: true}, func(*bench) {}, Announced, Ready},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, tt.options)
			tt.do(b)
			b.evaluate()
			b.want(vipA, tt.want, tt.reason)
		})
	}
}

func TestChangeOfOneVIPLeavesTheOthersAlone(t *testing.T) {
	b := newBench(t, Options{})
	b.say(SaidReady, vipA, vipB, vip6)
	b.say(SaidNotReady, vipA)
	if len(b.changes) != 1 || b.changes[0].VIP != vipA {
		t.Fatalf("changes %v, want only %s", b.changes, vipA)
	}
	b.gateways(true, false)
	if len(b.changes) != 1 || b.changes[0].VIP != vip6 {
		t.Fatalf("changes %v, want only %s", b.changes, vip6)
	}
}

func TestRestartWithinTheGraceWithdrawsOnlyWhatTheNewInstanceTakesBack(t *testing.T) {
	b := newBench(t, Options{})
	b.heard.Grace = 5 * time.Second
	b.say(SaidReady, vipA, vipB)
	b.hear(func(h *Heard) { h.Live, h.EndedAt = false, b.now })
	b.want(vipA, Announced, LBStale)
	b.now = b.now.Add(time.Second)
	b.hear(func(h *Heard) {
		h.Instance, h.Complete, h.Words = "lb-2", true, []Word{{VIP: vipA, Said: SaidReady}}
	})
	b.want(vipA, Announced, Ready)
	b.want(vipB, Withdrawn, LBNotReady)
}

func TestUnsyncedRestartDoesNotStopTheGrace(t *testing.T) {
	b := newBench(t, Options{})
	b.heard.Grace = 2 * time.Second
	b.say(SaidReady, vipA)
	b.hear(func(h *Heard) { h.Live, h.EndedAt = false, b.now })
	ended := b.now
	for range 10 {
		b.hear(func(h *Heard) { h.Live, h.EndedAt = false, ended }) // a new instance, not synced yet
		b.sleep(200*time.Millisecond, false)
	}
	b.want(vipA, Withdrawn, LBLost)
}

func TestSourceRoutingCountsWhicheverIsToldFirst(t *testing.T) {
	for _, routedFirst := range []bool{true, false} {
		b := &bench{t: t, g: New(Options{}), now: time.Unix(1000, 0)}
		routed, vips := vip.NewSet(vipA), []vip.VIP{vipA, vipB}
		if routedFirst {
			b.g.Route(routed)
			b.g.Configure(vips)
		} else {
			b.g.Configure(vips)
			b.g.Route(routed)
		}
		b.gateways(true, true)
		b.say(SaidReady, vipA, vipB)
		b.want(vipA, Announced, Ready)
		b.want(vipB, Withdrawn, NoSourceRouting)
	}
}

func TestLateLookExtendsTheLeaseOnceAndRaisesNothing(t *testing.T) {
	b := newBench(t, Options{})
	b.say(SaidReady, vipA)
	b.g.Configure([]vip.VIP{vipA, vipB})
	b.say(SaidReady, vipB)
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
		t.Fatalf("next look after %v, want %v", at.Sub(b.now), lateAfter)
	}
	b.now = b.now.Add(lateAfter + 2*lateAfter)
	b.evaluate()
	b.want(vipA, Withdrawn, LBLost)

	b.say(SaidReady, vipA)
	b.want(vipA, Announced, Ready)
}

func TestPunctualLookEndsTheLeaseAtOnce(t *testing.T) {
	b := newBench(t, Options{})
	b.say(SaidReady, vipA)
	b.now = b.now.Add(leaseTime)
	b.evaluate()
	b.want(vipA, Withdrawn, LBLost)
}

func TestOldSessionStateRevivesNothing(t *testing.T) {
	b := newBench(t, Options{})
	at := b.now
	b.now = at.Add(MaxSessionAge)
	b.say(SaidReady, vipA)
	b.want(vipA, Withdrawn, NoGateway)
	// Seen to end in time: a late look at the same state grants no extension.
	b.now = b.now.Add(2 * lateAfter)
	b.g.Gateways(Gateways{At: at, Up: [2]bool{true, true}})
	b.say(SaidReady, vipA)
	b.want(vipA, Withdrawn, NoGateway)
}

func TestLateLookExtendsTheSessionsOnce(t *testing.T) {
	b := newBench(t, Options{})
	b.say(SaidReady, vipA)
	b.now = b.now.Add(MaxSessionAge + 2*lateAfter)
	b.hear(func(*Heard) {})
	b.want(vipA, Announced, Ready)
	b.now = b.g.Deadline(b.now)
	b.hear(func(*Heard) {})
	b.want(vipA, Withdrawn, NoGateway)
}

func TestWordsAfterTheLeaseAreNoFlaps(t *testing.T) {
	b := newBench(t, Options{})
	b.say(SaidReady, vipA)
	for range 3 {
		b.sleep(leaseTime, false)
		b.want(vipA, Withdrawn, LBLost)
		b.say(SaidNotReady, vipA)
		b.say(SaidReady, vipA)
		b.want(vipA, Announced, Ready)
	}
}

func TestFirstOfTwoDrainsDecides(t *testing.T) {
	for _, tt := range []struct {
		lb, operator time.Duration
		reason       Reason
	}{
		{time.Second, 2 * time.Second, LBDraining},
		{2 * time.Second, time.Second, Drained},
	} {
		b := newBench(t, Options{DrainTime: tt.operator})
		b.say(SaidReady, vipA)
		end := b.now.Add(tt.lb)
		b.g.Drain(b.now, vipA)
		away := func(h *Heard) { h.GoingAway, h.DrainEnd = true, end }
		b.hear(away)
		b.want(vipA, Depreferred, tt.reason)
		b.now = b.now.Add(time.Second - time.Millisecond)
		b.hear(away)
		b.want(vipA, Depreferred, tt.reason)
		b.now = b.now.Add(time.Millisecond)
		b.hear(away)
		b.want(vipA, Withdrawn, tt.reason)
	}
}

func TestGraceBeginsWithTheEndOfTheLease(t *testing.T) {
	for name, after := range map[string]time.Duration{"the stream ends before its lease": leaseTime / 2, "the lease ends before its stream": leaseTime * 3 / 2} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, Options{})
			b.heard.Grace = 2 * time.Second
			b.say(SaidReady, vipA)
			began := b.now
			lease := b.heard.LeaseEnd
			b.sleep(after, false)
			b.hear(func(h *Heard) { h.Live, h.LeaseEnd, h.EndedAt = false, lease, b.now })
			lost := began.Add(min(after, leaseTime) + b.heard.Grace)
			b.sleep(lost.Sub(b.now)-time.Millisecond, false)
			b.want(vipA, Depreferred, LBStale)
			b.sleep(time.Millisecond, false)
			b.want(vipA, Withdrawn, LBLost)
		})
	}
}

func TestRiseOfAFlappingVIPWaitsLongerEachTime(t *testing.T) {
	b := newBench(t, Options{})
	b.say(SaidReady, vipA)
	for i, want := range []time.Duration{0, 1, 2, 4, 8, 16} {
		b.say(SaidNotReady, vipA)
		b.say(SaidReady, vipA)
		start := b.now
		for b.g.Decision(vipA).Advertisement != Announced {
			b.want(vipA, Withdrawn, Flapping)
			b.sleep(100*time.Millisecond, true)
		}
		if got := b.now.Sub(start); got != want*time.Second {
			t.Fatalf("flap %d: the rise waited %v, want %v", i+1, got, want*time.Second)
		}
	}
	b.sleep(flapWindow+time.Second, true)
	b.say(SaidNotReady, vipA)
	b.say(SaidReady, vipA)
	b.want(vipA, Announced, Ready)
}

func TestGatewaysLeasesAndDrainsAreNoFlaps(t *testing.T) {
	b := newBench(t, Options{DrainTime: time.Second})
	b.say(SaidReady, vipA)
	for range 5 {
		b.gateways(false, false)
		b.gateways(true, true)
		b.sleep(2*leaseTime, false)
		b.say(SaidReady, vipA)
		b.g.Drain(b.now, vipA)
		b.sleep(2*time.Second, true)
		b.want(vipA, Withdrawn, Drained)
		b.g.Undrain(vipA)
		b.evaluate()
		b.hear(func(h *Heard) { h.Instance, h.Complete = b.now.String(), true })
		b.say(SaidReady, vipA)
	}
	b.want(vipA, Announced, Ready)
}

func TestForgottenVIPsCostNoMemory(t *testing.T) {
	b := newBench(t, Options{})
	b.g.Configure(nil)
	b.say(SaidReady, vipA, vipB)
	b.hear(func(h *Heard) { h.Removed = []vip.VIP{vipA, vipB} })
	if len(b.g.vips) != 0 {
		t.Fatalf("%d VIPs are still kept", len(b.g.vips))
	}
}
