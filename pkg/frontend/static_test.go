package frontend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestAttracts(t *testing.T) {
	tests := []struct {
		n        gate.Attraction
		any, all bool
	}{
		{gate.Attraction{}, false, false},
		{gate.Attraction{Configured: 2}, false, false},
		{gate.Attraction{Configured: 2, Announced: 1}, true, false},
		{gate.Attraction{Configured: 2, Announced: 2}, true, true},
		{gate.Attraction{Configured: 2, Depreferred: 2}, false, false},
		{gate.Attraction{Configured: 2, Announced: 1, Depreferred: 1}, true, false},
	}
	for _, tt := range tests {
		if got := attracts(tt.n, 0, false); got != tt.any {
			t.Errorf("%+v with any: %v", tt.n, got)
		}
		if got := attracts(tt.n, 0, true); got != tt.all {
			t.Errorf("%+v with all: %v", tt.n, got)
		}
	}
}

// A VIP that leaves the configuration does not hold down the static gateways of the remaining
// VIPs.
func TestLeavingVIPsDoNotCount(t *testing.T) {
	a := &attractor{all: true, current: latest.New(attraction{}), apply: func(time.Time, [len(vip.Families)]bool) {}}
	n := [len(vip.Families)]gate.Attraction{vip.IPv4: {Configured: 3, Announced: 2, Depreferred: 1}}
	up := func() bool {
		a.follow(time.Now(), n)
		return a.current.Load().Up[vip.IPv4]
	}
	if up() {
		t.Error("they attract though a VIP is de-preferred")
	}
	a.leave([]vip.VIP{vip.Require("20.0.0.1/32"), vip.Require("2000::1/128")})
	if !up() {
		t.Error("a VIP that leaves takes them down")
	}
	n[vip.IPv4] = gate.Attraction{Configured: 2, Announced: 2}
	if !up() {
		t.Error("they are down although every VIP is announced")
	}
	a.leave(nil)
	n[vip.IPv4] = gate.Attraction{Configured: 2, Announced: 1}
	if up() {
		t.Error("they attract though a VIP is not announced")
	}
}

// Each pass renews the supervisor's lease. Readers of the attraction wake only after a change.
func TestAttractorRenewsEachPass(t *testing.T) {
	var applied []string
	a := &attractor{current: latest.New(attraction{}), apply: func(at time.Time, up [len(vip.Families)]bool) {
		applied = append(applied, fmt.Sprint(at.Unix(), up))
	}}
	_, changed := a.current.Get()
	woken := func() (is bool) {
		select {
		case <-changed:
			is = true
		default:
		}
		_, changed = a.current.Get()
		return is
	}
	for i, announced := range []int{0, 1, 1, 2} {
		a.follow(time.Unix(int64(i), 0), [len(vip.Families)]gate.Attraction{vip.IPv6: {Announced: announced}})
		if got, want := woken(), i == 1 || i == 3; got != want {
			t.Errorf("pass %d woke the readers: %v", i, got)
		}
	}
	want := "[0 [false false] 1 [false true] 2 [false true] 3 [false true]]"
	if got := fmt.Sprint(applied); got != want {
		t.Errorf("applied %s, want %s", got, want)
	}
}

// A static gateway that is held down counts as usable.
func TestGatewaysCountUsable(t *testing.T) {
	g := bird.GatewayState{
		Name: "g", Family: vip.IPv4, Protocol: trench.Static, Held: true, Usable: true, Imported: 1,
	}
	for _, requireRoute := range []bool{false, true} {
		got := gateways(bird.State{Alive: true, Gateways: []bird.GatewayState{g}}, requireRoute).Up
		if got != [len(vip.Families)]bool{vip.IPv4: true} {
			t.Errorf("up: %v", got)
		}
	}
	g.Usable = false
	if got := gateways(bird.State{Alive: true, Gateways: []bird.GatewayState{g}}, false).Up; got[vip.IPv4] {
		t.Error("a gateway that is not usable counts as up")
	}
}

// A withdrawn VIP whose family shares a static gateway is reported as unconfirmed. A VIP of the
// other family is confirmed.
func TestSharedWithdrawalIsUnconfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		r.shared = func(f vip.Family) error {
			if f == vip.IPv4 {
				return errShared
			}
			return nil
		}
		six := vip.Require("2000::1/128")
		r.written(1)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		r.decide(1, six, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(2 * settle)
		r.want(t, vipA, gate.Withdrawn, true)
		r.want(t, six, gate.Withdrawn, false)
	})
}

// The last withdrawal of the family confirms the earlier ones; a change of the reason does not.
func TestSharedWithdrawalConfirmedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		shared := errShared
		r.shared = func(vip.Family) error { return shared }
		r.written(3)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(2 * settle)
		r.decide(2, vipA, gate.Withdrawn, gate.Withdrawn, gate.NoSourceRouting)
		synctest.Wait()
		r.want(t, vipA, gate.Withdrawn, true)
		shared = nil
		r.decide(3, vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(2 * settle)
		r.want(t, vipA, gate.Withdrawn, false)
		r.want(t, vipB, gate.Withdrawn, false)
		if got, _ := r.of(vipA); got.Reason != gate.NoSourceRouting {
			t.Errorf("reported the old reason %v", got.Reason)
		}
	})
}

// Only a confirmed withdrawal of the family confirms the earlier ones.
func TestSharedWithdrawalStaysUnconfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		six, last := vip.Require("2000::1/128"), vip.Require("20.0.0.3/32")
		shared, unconfirmed := errShared, error(nil)
		r.shared = func(vip.Family) error { return shared }
		r.confirm = func(context.Context) error { return unconfirmed }
		r.written(4)
		withdraw := func(revision uint64, v vip.VIP) {
			r.decide(revision, v, gate.Announced, gate.Withdrawn, gate.LBNotReady)
			pass(2 * settle)
			synctest.Wait() // before the next change of shared and unconfirmed
		}
		withdraw(1, vipA)
		shared = nil
		withdraw(2, six)
		r.want(t, six, gate.Withdrawn, false)
		r.want(t, vipA, gate.Withdrawn, true)
		unconfirmed = context.DeadlineExceeded
		withdraw(3, vipB)
		r.want(t, vipB, gate.Withdrawn, true)
		r.want(t, vipA, gate.Withdrawn, true)
		unconfirmed = nil
		withdraw(4, last)
		r.want(t, vipA, gate.Withdrawn, false)
	})
}

// A withdrawal waits for gateways that send traffic until their detection time expires.
func TestWithdrawalAwaitsDetection(t *testing.T) {
	for _, slow := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const detection = 900 * time.Millisecond
			r := startReporter(t)
			r.detection = func() time.Duration { return detection }
			r.confirm = func(ctx context.Context) error {
				took := detection
				if slow {
					took *= 2
				}
				select {
				case <-time.After(took):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			r.written(1)
			r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
			pass(confirmTimeout + detection + settle + time.Millisecond)
			r.want(t, vipA, gate.Withdrawn, slow)
		})
	}
}

// staticProcess returns a process with only the state that static gateways need.
func staticProcess(up bool, gateways ...trench.Gateway) *process {
	config := &trench.Config{Attractor: trench.Attractor{Gateways: gateways}}
	p := &process{
		Options:   Options{Source: trenchfile.NewWatcher("", trench.Defaults{}, config, slog.New(slog.DiscardHandler))},
		attractor: &attractor{current: latest.New(attraction{})},
	}
	p.attractor.current.Set(attraction{Up: [len(vip.Families)]bool{vip.IPv4: up, vip.IPv6: up}})
	return p
}

func TestSharedGateways(t *testing.T) {
	four, six := netip.MustParseAddr("169.254.100.150"), netip.MustParseAddr("fd00:100::150")
	bfd := &trench.BFD{MinTx: 200 * time.Millisecond, MinRx: time.Second, Multiplier: 4}
	static := trench.Gateway{Name: "s", Address: four, Protocol: trench.Static, BFD: bfd}
	bgp := trench.Gateway{Name: "b", Address: four, BFD: &trench.BFD{MinTx: time.Minute, Multiplier: 5}}
	open := trench.Gateway{Name: "o", Address: six, Protocol: trench.Static}
	tests := map[string]struct {
		p    *process
		want [len(vip.Families)]bool
	}{
		"BGP":                   {staticProcess(true, bgp), [2]bool{}},
		"family attracts":       {staticProcess(true, bgp, static), [2]bool{true, false}},
		"held down":             {staticProcess(false, bgp, static), [2]bool{}},
		"without BFD":           {staticProcess(false, static, open), [2]bool{false, true}},
		"attracts, without BFD": {staticProcess(true, static, open), [2]bool{true, true}},
	}
	for name, tt := range tests {
		for _, f := range vip.Families {
			if err := tt.p.shared(f); errors.Is(err, errShared) != tt.want[f] {
				t.Errorf("%s, %s: %v", name, f, err)
			}
		}
	}
	fast := static
	fast.BFD = &trench.BFD{MinTx: 100 * time.Millisecond, Multiplier: 3}
	for _, gateways := range [][]trench.Gateway{{bgp, static, fast, open}, {fast, static}} {
		if got := staticProcess(false, gateways...).detectionTime(); got != 800*time.Millisecond {
			t.Errorf("detection time %v", got)
		}
	}
}

// The events of VIPs that are not announced name the static gateways that still send their
// traffic.
func TestSharedVIPEvents(t *testing.T) {
	o, _ := testObserver()
	o.causes = causes{
		reason: func(gate.Reason, vip.Family) string { return "cause" },
		shared: func(vip.Family) string { return "gateway-a still sends" },
	}
	o.decided(decisions{Changes: []gate.Change{
		{VIP: vipA, To: gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}},
		{
			VIP: vipB, From: gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready},
			To: gate.Decision{Reason: gate.LBNotReady},
		},
	}})
	o.drain()
	list := eventsOf(t, o)
	for i, want := range []string{"cause", "cause; gateway-a still sends"} {
		if list[i].GetDetail() != want {
			t.Errorf("%s: %q, want %q", list[i].GetObject(), list[i].GetDetail(), want)
		}
	}
}

func TestHeldGatewayEvent(t *testing.T) {
	g := bird.GatewayState{Name: "g", Protocol: trench.Static, Up: true, Usable: true, Since: time.Unix(1, 0)}
	was := bird.State{Alive: true, Gateways: []bird.GatewayState{g}}
	g.Held, g.State, g.LastError = true, bird.StateHeld, "remote signaled Down"
	waits := bird.State{Alive: true, Gateways: []bird.GatewayState{g}} // the gateway has not noticed yet
	if events := sessionEvents(was, waits); len(events) != 0 {
		t.Errorf("events %+v", events)
	}
	g.Up = false
	events := sessionEvents(waits, bird.State{Alive: true, Gateways: []bird.GatewayState{g}})
	if len(events) != 1 || events[0].GetTo() != "down" || !strings.Contains(events[0].GetDetail(), "held down") {
		t.Errorf("events %+v", events)
	}
}

// Static gateways are held down before the withdrawal of their last VIP is reported, because the
// load balancer stops forwarding after that report.
func TestStaticFollowsBeforeReport(t *testing.T) {
	o, _ := testObserver()
	decided := 0
	queued := func() int {
		o.queue.Drain(func(queue []input, _ int) {
			for _, in := range queue {
				if len(in.Changes) > 0 {
					decided++
				}
			}
		})
		return decided
	}
	var seen []string
	a := &attractor{current: latest.New(attraction{}), apply: func(_ time.Time, up [len(vip.Families)]bool) {
		seen = append(seen, fmt.Sprint(up[vip.IPv4], queued()))
	}}
	static := bird.GatewayState{Family: vip.IPv4, Protocol: trench.Static, Up: true, Usable: true}
	s := &scriptedSource{update: readiness.Update{
		Position: readiness.Position{InstanceID: "lb", Revision: 1}, Complete: true, Synced: true, Open: true,
		LeaseEnd: time.Now().Add(time.Hour), Changed: []readiness.VIPReadiness{{VIP: vipA, State: vip.Ready}},
	}}
	c := &controller{
		gate: gate.New(gate.Options{}), source: s, announcer: announce.New(announce.Options{}), observer: o, attractor: a,
		deadline: time.NewTimer(time.Hour),
	}
	c.gate.Configure([]vip.VIP{vipA})
	c.gate.Route(vip.NewSet(vipA))
	c.gate.Gateways(gateways(bird.State{At: time.Now(), Alive: true, Gateways: []bird.GatewayState{static}}, false))
	c.step(nil)
	s.update.Position.Revision, s.update.Changed[0].State = 2, vip.NotReady
	c.step(nil)
	if got := fmt.Sprint(seen); got != "[true 0 false 1]" || queued() != 2 {
		t.Errorf("attraction and queued decisions: %s, in the end %d", got, queued())
	}
}

// The earlier withdrawal of a VIP that is announced again is not reported a second time.
func TestAnnouncedVIPIsNotReportedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := startReporter(t)
		attracts := true
		r.shared = func(vip.Family) error {
			if attracts {
				return errShared
			}
			return nil
		}
		r.written(9)
		r.decide(1, vipA, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(time.Second)
		r.want(t, vipA, gate.Withdrawn, true)
		r.decide(2, vipA, gate.Withdrawn, gate.Announced, gate.Ready)
		r.want(t, vipA, gate.Announced, false)
		attracts = false
		r.decide(3, vipB, gate.Announced, gate.Withdrawn, gate.LBNotReady)
		pass(time.Second)
		r.want(t, vipB, gate.Withdrawn, false)
		r.want(t, vipA, gate.Announced, false)
	})
}
