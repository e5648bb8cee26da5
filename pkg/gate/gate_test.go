package gate

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/vip"
)

// maxSessionAge is how long the state of the gateway sessions is valid without options.
const maxSessionAge = maxPollInterval + usualSilence

// modelFactor multiplies the runs of the model, which take 0.1 ms: planted defects were found within
// 1 000 runs. The flag -rapid.checks has the last word.
const modelFactor = 30

func TestMain(m *testing.M) {
	checks := flag.Lookup("rapid.checks")
	n, err := strconv.Atoi(checks.DefValue)
	if err == nil {
		checks.DefValue = strconv.Itoa(modelFactor * n)
		err = checks.Value.Set(checks.DefValue)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m) // parses the flags
}

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
	vip6 = vip.Require("2000::1/128")
)

// fixture drives a Gate with a simulated clock.
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
	b.g.Announcer(Announcer{Up: true, Since: b.now})
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
		b.gateways(b.g.gateways.Up[0], b.g.gateways.Up[1])
	}
}

func (b *fixture) want(v vip.VIP, a Advertisement, r Reason) {
	b.t.Helper()
	if got := b.g.Decision(v); got != (Decision{Advertisement: a, Reason: r}) {
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
			b.now = b.now.Add(maxSessionAge)
			b.setState(vip.Ready, vipA)
		}, Withdrawn, NoGateway},
		{"5 no session with BIRD yet", Options{}, func(b *fixture) {
			b.g.Announcer(Announcer{})
			b.setState(vip.Ready, vipA)
		}, Withdrawn, NotAccepted},
		{"5 session down for one reconnect", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Announcer(Announcer{Since: b.now})
			b.advance(reconnectTime, true)
		}, Withdrawn, NotAccepted},
		{"5 session down for less", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Announcer(Announcer{Since: b.now})
			b.advance(reconnectTime-time.Millisecond, true)
		}, Announced, Ready},
		{"5 session back", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Announcer(Announcer{Since: b.now})
			b.advance(2*reconnectTime, true)
			b.g.Announcer(Announcer{Up: true, Since: b.now})
		}, Announced, Ready},
		{"5 static gateway", Options{}, func(b *fixture) {
			b.g.Announcer(Announcer{})
			b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}, Static: [2]bool{true, false}})
			b.setState(vip.Ready, vipA)
		}, Announced, Ready},
		{"5 static gateway of the other family", Options{}, func(b *fixture) {
			b.g.Announcer(Announcer{})
			b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}, Static: [2]bool{false, true}})
			b.setState(vip.Ready, vipA)
		}, Withdrawn, NotAccepted},
		{
			"6 lease expired",
			Options{},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.advance(leaseTime, false) },
			Withdrawn, LBLost,
		},
		{"6 stream ended", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.Live, h.EndedAt = false, b.now })
		}, Withdrawn, LBLost},
		{
			"6 kept by policy",
			Options{OnLoss: KeepOnLoss},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.advance(time.Hour, false) }, Announced, LBStale,
		},
		{
			"7 stopping",
			Options{DrainTime: time.Second},
			func(b *fixture) { b.setState(vip.Ready, vipA); b.g.Stop(b.now) },
			Depreferred, Stopping,
		},
		{"7 drained", Options{DrainTime: time.Second}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Drain(b.now,
				vipA)
		}, Depreferred, Drained},
		{"7 load balancer stopping", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) { h.GoingAway, h.DrainEnd = true, b.now.Add(time.Second) })
		}, Depreferred, LBDraining},
		{"7 VIP draining", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) {
				h.VIPs = []VIPState{{VIP: vipA, State: vip.Draining, DrainEnd: b.now.Add(time.Second)}}
			})
		}, Depreferred, LBDraining},
		{"7 never raises", Options{DrainTime: time.Second}, func(b *fixture) {
			b.g.Stop(b.now)
			b.evaluate()
			b.setState(vip.Ready, vipA)
		}, Withdrawn, Stopping},
		{"8 frontend stopped", Options{DrainTime: time.Second}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Stop(b.now)
			b.advance(time.Second, true)
		}, Withdrawn, Stopping},
		{"8 drained", Options{DrainTime: time.Second}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Drain(b.now, vipA)
			b.advance(time.Second, true)
		}, Withdrawn, Drained},
		{"8 VIP drained by the load balancer", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.updateLB(func(h *LBUpdate) {
				h.VIPs = []VIPState{{VIP: vipA, State: vip.Draining, DrainEnd: b.now.Add(time.Second)}}
			})
			b.advance(time.Second, true)
		}, Withdrawn, LBDraining},
		{"9 stale", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.advance(4*time.Second, false)
		}, Announced, LBStale},
		{"9 final second of the grace period", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.advance(5*time.Second, false)
		}, Depreferred, LBStale},
		{"9 never raises", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.gateways(false, true)
			b.advance(2*time.Second, false)
			b.gateways(true, true)
		}, Withdrawn, LBStale},
		{"2 last resort of a VIP that was never ready", Options{}, func(b *fixture) {
			b.lastResort()
		}, Withdrawn, LBNotReady},
		{"2 last resort of a VIP that was removed and added again", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.lastResort()
			b.g.Configure(nil)
			b.evaluate()
			b.g.Configure([]vip.VIP{vipA})
			b.lastResort()
		}, Withdrawn, LBNotReady},
		{"6 last resort, lease expired", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.lastResort()
			b.advance(leaseTime, false)
		}, Withdrawn, LBLost},
		{"8 last resort, stopping", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.lastResort()
			b.g.Stop(b.now)
		}, Withdrawn, Stopping},
		{"9 last resort, stale", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.lastResort()
			b.evaluate()
			b.advance(2*time.Second, false)
		}, Depreferred, LBStale},
		{"10 last resort", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.evaluate()
			b.lastResort()
		}, Depreferred, LastResort},
		{"10 last resort again after the loss of all gateways", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.lastResort()
			b.gateways(false, true)
			b.evaluate()
			b.gateways(true, true)
		}, Depreferred, LastResort},
		{"11 a recovered last resort is not damped", Options{}, func(b *fixture) {
			for range 3 {
				b.setState(vip.NotReady, vipA)
				b.setState(vip.Ready, vipA)
			}
			b.lastResort()
			b.evaluate()
			b.setState(vip.Ready, vipA)
		}, Announced, Ready},
		{"11 flapping", Options{}, func(b *fixture) {
			for range 3 {
				b.setState(vip.NotReady, vipA)
				b.setState(vip.Ready, vipA)
			}
		}, Withdrawn, Flapping},
		{"13 ready", Options{}, func(b *fixture) { b.setState(vip.Ready, vipA) }, Announced, Ready},
		{"14 ungated", Options{Ungated: true}, func(*fixture) {}, Announced, Ready},
		{"13 exported to no gateway", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.exported(vip.NewSet(vipB))
		}, Announced, NotExported},
		{"13 drained", Options{DrainTime: time.Hour}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.evaluate()
			b.exported(vip.Set{})
			b.g.Drain(b.now, vipA)
		}, Depreferred, NotExported},
		{"13 stale", Options{}, func(b *fixture) {
			b.lastUpdate.Grace = 5 * time.Second
			b.setState(vip.Ready, vipA)
			b.evaluate()
			b.advance(2*time.Second, false)
			b.exported(vip.Set{})
		}, Announced, NotExported},
		{"13 other family", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}, Exported: [2]vip.Set{nil, {}}})
		}, Announced, Ready},
		{"13 exported later", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.exported(vip.Set{})
			b.evaluate()
			b.want(vipA, Announced, NotExported)
			b.exported(vip.NewSet(vipA))
		}, Announced, Ready},
		{"13 every VIP exported later", Options{}, func(b *fixture) {
			b.setState(vip.Ready, vipA)
			b.exported(vip.Set{})
			b.evaluate()
			b.exported(nil)
		}, Announced, Ready},
		{"12 suspected", Options{}, func(b *fixture) { b.suspected() }, Depreferred, Suspected},
		{"12 no longer suspected", Options{}, func(b *fixture) {
			b.suspected()
			b.evaluate()
			b.setState(vip.Ready, vipA)
		}, Announced, Ready},
		{"9 suspected and stale", Options{}, func(b *fixture) {
			b.updateLB(func(h *LBUpdate) { h.Grace = 5 * time.Second })
			b.suspected()
			b.evaluate()
			b.advance(2*time.Second, false)
		}, Depreferred, LBStale},
		{"12 ungated", Options{Ungated: true}, func(b *fixture) { b.suspected() }, Announced, Ready},
		{"14 ungated, LB stopped", Options{Ungated: true}, func(b *fixture) {
			b.updateLB(func(u *LBUpdate) { u.GoingAway, u.DrainEnd = true, b.now.Add(-time.Second) })
		}, Announced, Ready},
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

// lastResort reports that too few targets of vipA are ready, and that it is a last resort.
func (b *fixture) lastResort() {
	b.updateLB(func(h *LBUpdate) { h.VIPs = []VIPState{{VIP: vipA, State: vip.NotReady, LastResort: true}} })
}

// suspected reports that vipA is ready, and that probes find it dead.
func (b *fixture) suspected() {
	b.updateLB(func(h *LBUpdate) { h.VIPs = []VIPState{{VIP: vipA, State: vip.Ready, Suspected: true}} })
}

// exported sets the IPv4 VIPs that gateways receive; nil means that no VIP is missing.
func (b *fixture) exported(vips vip.Set) {
	b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}, Exported: [2]vip.Set{vips}})
}

// Static gateways need no announcer: the attraction does not depend on it.
func TestAttractionWithoutAnnouncer(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA, vip6)
	want := b.g.Attract()
	b.g.Announcer(Announcer{Since: b.now})
	b.advance(2*reconnectTime, true)
	b.want(vipA, Withdrawn, NotAccepted)
	if got := b.g.Attract(); got != want || got[vip.IPv4].Announced != 1 {
		t.Errorf("attraction %+v, with a session %+v", got, want)
	}
}

// A second stop signal does not extend the drain.
func TestSecondStop(t *testing.T) {
	const drain = 2 * time.Second
	b := newFixture(t, Options{DrainTime: drain})
	b.setState(vip.Ready, vipA)
	b.g.Stop(b.now)
	b.advance(drain/2, true)
	b.g.Stop(b.now)
	b.advance(drain/2, true)
	b.want(vipA, Withdrawn, Stopping)
}

// SkipDrains has no effect before Stop.
func TestSkipDrainsBeforeStop(t *testing.T) {
	b := newFixture(t, Options{DrainTime: time.Second})
	b.setState(vip.Ready, vipA)
	b.g.SkipDrains(b.now)
	b.evaluate()
	b.want(vipA, Announced, Ready)
	b.g.Stop(b.now)
	b.g.SkipDrains(b.now)
	b.evaluate()
	b.want(vipA, Withdrawn, Stopping)
}

// A VIP that is configured after a snapshot without it is not ready.
func TestConfiguredAfterSnapshot(t *testing.T) {
	b := newFixture(t, Options{})
	b.g.Configure([]vip.VIP{vipA})
	b.updateLB(func(u *LBUpdate) { u.Complete, u.VIPs = true, []VIPState{{VIP: vipA, State: vip.Ready}} })
	b.g.Configure([]vip.VIP{vipA, vipB})
	b.evaluate()
	b.want(vipB, Withdrawn, LBNotReady)
}

// Two flaps delay a rise only within the window.
func TestFlapWindow(t *testing.T) {
	const within, beyond = flapWindow - time.Second, flapWindow + time.Second
	for apart, want := range map[time.Duration]Reason{within: Flapping, beyond: Ready} {
		b := newFixture(t, Options{})
		b.setState(vip.Ready, vipA)
		b.setState(vip.NotReady, vipA)
		b.setState(vip.Ready, vipA)
		b.advance(apart, true)
		b.setState(vip.NotReady, vipA)
		b.setState(vip.Ready, vipA)
		if got := b.g.Decision(vipA).Reason; got != want {
			t.Errorf("flaps %v apart: %s, want %s", apart, got, want)
		}
	}
}

// Edits do not count as flaps: a VIP whose new configuration has no ready target, and one that is
// removed and added.
func TestNewConfigurationDoesNotFlap(t *testing.T) {
	edits := map[string]func(*LBUpdate){
		"new stream not ready": func(u *LBUpdate) {
			u.VIPs = []VIPState{{VIP: vipA, State: vip.NotReady, Reconfigured: true}}
		},
		"removed": func(u *LBUpdate) { u.Removed = []vip.VIP{vipA} },
	}
	for name, edit := range edits {
		b := newFixture(t, Options{})
		for range 2 * maxFlaps {
			b.setState(vip.Ready, vipA)
			if got := b.g.Decision(vipA).Reason; got != Ready {
				t.Fatalf("%s: %s", name, got)
			}
			b.updateLB(edit)
			if got := b.g.Decision(vipA).Reason; got == Ready {
				t.Fatalf("%s: %s", name, got)
			}
		}
	}
}

// Changes of a state that all VIPs share do not count as flaps.
func TestSharedStateDoesNotFlap(t *testing.T) {
	b := newFixture(t, Options{})
	for range 2 * maxFlaps {
		for _, state := range []vip.State{vip.Ready, vip.NotReady} {
			b.updateLB(func(u *LBUpdate) { u.Shared, u.VIPs = true, []VIPState{{VIP: vipA, State: state}} })
			if got := b.g.Decision(vipA).Reason; (got == Ready) != (state == vip.Ready) {
				t.Fatalf("%v: %s", state, got)
			}
		}
	}
}

func TestAdvertised(t *testing.T) {
	for d, want := range map[Decision]bool{
		{Announced, Ready, 1}: true, {Depreferred, Drained, 1}: true, {Announced, NotExported, 1}: false,
		{Withdrawn, NotAccepted, 0}: false, {Announced, LBStale, 0}: true,
	} {
		if d.Advertised() != want {
			t.Errorf("%v is advertised: %v", d, !want)
		}
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
		b.g.Announcer(Announcer{Up: true})
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

	if at := b.g.Deadline(b.now); !at.Equal(b.now.Add(2 * lateAfter)) {
		t.Fatalf("next deadline after %v, want %v", at.Sub(b.now), 2*lateAfter)
	}
	b.now = b.now.Add(5 * lateAfter)
	b.evaluate()
	b.want(vipA, Withdrawn, LBLost)

	b.setState(vip.Ready, vipA)
	b.want(vipA, Announced, Ready)
}

// A stall moves the end of the sessions' state, which is repeated without a new survey, and of no
// lease of the load balancer.
func TestStallKeepsSessions(t *testing.T) {
	b := newFixture(t, Options{})
	at := b.now
	b.setState(vip.Ready, vipA)
	const stall = time.Minute
	b.now = b.now.Add(stall + maxSessionAge - time.Millisecond)
	b.g.Stalled(b.now, stall)
	b.g.Gateways(Gateways{At: at, Up: [2]bool{true, true}})
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Announced, Ready)
	if at := b.g.Deadline(b.now); !at.Equal(b.now.Add(time.Millisecond)) {
		t.Errorf("next deadline after %v", at.Sub(b.now))
	}
	b.now = b.g.Deadline(b.now)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Withdrawn, NoGateway)
	b.g.Stalled(b.now, stall)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Withdrawn, NoGateway)
}

// A state that was read after the stall, but before the stall was noticed, has its usual validity.
func TestStallKeepsNewSessions(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	const stall = time.Minute
	b.now = b.now.Add(stall)
	b.g.Gateways(Gateways{At: b.now, Up: [2]bool{true, true}})
	b.now = b.now.Add(time.Millisecond)
	b.g.Stalled(b.now, stall)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Announced, Ready)
	b.now = b.now.Add(maxSessionAge)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Withdrawn, NoGateway)
}

// A state that was read before the stall, and arrives when the stall has been noticed, does not end
// before the next one is due.
func TestStallKeepsOldSessions(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	at := b.now.Add(time.Millisecond)
	const stall = time.Minute
	b.now = b.now.Add(stall)
	b.g.Stalled(b.now, stall)
	b.g.Gateways(Gateways{At: at, Up: [2]bool{true, true}})
	b.evaluate()
	b.now = b.now.Add(maxSessionAge - time.Millisecond)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Announced, Ready)
	b.now = b.now.Add(time.Millisecond)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Withdrawn, NoGateway)
}

// A speaker that may be silent for longer keeps its sessions for longer.
func TestSilenceKeepsSessions(t *testing.T) {
	const silence = 6 * time.Second
	b := newFixture(t, Options{Silence: silence})
	b.setState(vip.Ready, vipA)
	b.now = b.now.Add(maxPollInterval + silence - time.Millisecond)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Announced, Ready)
	b.now = b.now.Add(time.Millisecond)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Withdrawn, NoGateway)
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
	b.now = at.Add(maxSessionAge)
	b.setState(vip.Ready, vipA)
	b.want(vipA, Withdrawn, NoGateway)
	// The lease was found expired in time: a later check does not extend it.
	b.now = b.now.Add(2 * lateAfter)
	b.g.Gateways(Gateways{At: at, Up: [2]bool{true, true}})
	b.setState(vip.Ready, vipA)
	b.want(vipA, Withdrawn, NoGateway)
}

// A survey that takes longer than it counts is no late check, and raises nothing; one in time does.
func TestOldSurveysRaiseNothing(t *testing.T) {
	b := newFixture(t, Options{})
	up := [2]bool{true, true}
	at := b.now
	b.now = at.Add(maxSessionAge)
	b.setState(vip.Ready, vipA)
	b.want(vipA, Withdrawn, NoGateway)
	for range 3 {
		b.now = b.now.Add(maxSessionAge)
		for late := range time.Duration(2) {
			b.g.Gateways(Gateways{At: b.now.Add(late - maxSessionAge - 2*lateAfter), Up: up})
		}
		b.setState(vip.Ready, vipA)
		b.want(vipA, Withdrawn, NoGateway)
	}
	b.g.Gateways(Gateways{At: b.now.Add(1 - maxSessionAge), Up: up})
	b.setState(vip.Ready, vipA)
	b.want(vipA, Announced, Ready)
	b.now = b.now.Add(1 + 2*lateAfter)
	b.updateLB(func(*LBUpdate) {})
	b.want(vipA, Announced, Ready)
}

func TestLateCheckExtendsSessionsOnce(t *testing.T) {
	b := newFixture(t, Options{})
	b.setState(vip.Ready, vipA)
	b.now = b.now.Add(maxSessionAge + 2*lateAfter)
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
