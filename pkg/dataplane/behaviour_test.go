package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// expect fails the test unless the kernel's IPv4 table contains exactly these targets.
func (w *modelFixture) expect(t *testing.T, stream string, names ...string) {
	t.Helper()
	if got := w.serving(stream, vip.IPv4); !slices.Equal(got, names) {
		t.Fatalf("in the table of %s: %q, want %q", stream, got, names)
	}
}

func (w *modelFixture) problem(object string) (Problem, bool) {
	for _, p := range w.state().Problems {
		if p.Object == object {
			return p, true
		}
	}
	return Problem{}, false
}

func TestRemovedServingTargetDrains(t *testing.T) {
	w := newModelFixture()
	w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving), testTarget("x3", plan.Draining),
		testTarget("x4", plan.Serving)), false)
	w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving), testTarget("x4", plan.Down)), false)
	left := streamA(testTarget("x1", plan.Serving))
	w.k.conns[w.number("a", "x2")] = true
	number := w.number("a", "x2")
	w.restart()
	w.settle(left, false)
	w.expect(t, "a", "x1")
	if s := w.slot("a", "x2"); s == nil || !s.Flows[vip.IPv4] {
		t.Fatalf("x2 served and does not drain: %+v", s)
	}
	if w.slot("a", "x4") != nil {
		t.Fatal("x4 was down and is there still")
	}
	if end := w.e.deadlines(); len(end) != 1 || !end[0].Equal(w.clock.Add(10*time.Second)) {
		t.Fatalf("drain ends at %s", end)
	}
	// The drain continues after a restart, and a backward clock jump does not extend it.
	w.clock = w.clock.Add(-time.Hour)
	w.restart()
	w.settle(left, false)
	if end := w.e.deadlines(); len(end) != 1 || end[0].Sub(w.clock) > 10*time.Second {
		t.Fatalf("drain ends at %s", end)
	}
	w.clock = w.clock.Add(10 * time.Second)
	w.settle(left, false)
	if len(w.k.Targets) != 1 || w.k.conns[number] || len(w.e.targets) != 1 {
		t.Fatalf("left: %+v, connections %v", w.k.Targets, w.k.conns)
	}
}

// The rules and routes of a removed target remain while connections have its fwmark.
func TestRoutesOutliveConnections(t *testing.T) {
	w := newModelFixture()
	with := func(role plan.Role) *plan.Desired {
		return desiredOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving), testTarget("x2", role)))
	}
	w.settle(with(plan.Serving), false)
	number := w.number("a", "x2")
	w.settle(with(plan.Down), false)
	left := streamA(testTarget("x1", plan.Serving))
	w.k.conns[number], w.k.flushErr = true, errors.New("connection tracking is busy")
	for range 2 {
		w.settle(left, false)
		if s := w.k.Targets[number]; s == nil || !s.Rules[vip.IPv4] || !s.NextHops[vip.IPv4].IsValid() {
			t.Fatalf("connections have the fwmark, and left of the target is %+v", s)
		}
		if p, ok := w.problem("stream a"); !ok || !strings.Contains(p.Detail, "connection tracking is busy") {
			t.Errorf("problems: %v", w.state().Problems)
		}
	}
	w.k.flushErr = nil
	w.settle(left, false)
	if s := w.k.Targets[number]; s != nil || w.k.conns[number] || w.number("a", "x2") != 0 || len(w.state().Problems) > 0 {
		t.Errorf("left: %+v, connections %v, problems %v", s, w.k.conns, w.state().Problems)
	}
}

func TestReturningTargetKeepsItsFWMark(t *testing.T) {
	w := newModelFixture()
	both := func() *plan.Desired {
		return streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving))
	}
	w.settle(both(), false)
	number := w.number("a", "x2")
	w.settle(streamA(testTarget("x1", plan.Serving)), false)
	w.settle(both(), false)
	w.expect(t, "a", "x1", "x2")
	if w.number("a", "x2") != number || w.k.births[number] != 1 {
		t.Fatal("it got another number, or another chain")
	}
	if len(w.e.deadlines()) > 0 {
		t.Fatal("it drains still")
	}
}

func TestUnknownTargetsKeepTheirRole(t *testing.T) {
	w := newModelFixture()
	w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Draining), testTarget("x3", plan.Serving),
		testTarget("x4", plan.Serving)), false)
	w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x3", plan.Draining), testTarget("x4", plan.Down)), false)
	w.restart()
	writes := w.k.writes
	w.settle(streamA(testTarget("x1", plan.Unknown), testTarget("x3", plan.Unknown), testTarget("x4", plan.Unknown),
		testTarget("x5", plan.Unknown)), false)
	w.expect(t, "a", "x1")
	if w.k.writes != writes {
		t.Fatal("something was written")
	}
	if s := w.slot("a", "x3"); !s.Flows[vip.IPv4] {
		t.Fatal("x3 does not drain any more")
	}
	if s := w.slot("a", "x4"); s == nil || s.Flows[vip.IPv4] || w.slot("a", "x5") != nil {
		t.Fatal("x4 or x5 is not as it was")
	}
}

func TestRoutesAreRestoredWithTheirLink(t *testing.T) {
	for _, tt := range []struct {
		name string
		// flap: the link comes up again before the engine observes it.
		flap, restart bool
	}{{name: "down and up"}, {name: "down and up between two looks", flap: true}, {
		name: "down and up while no plane ran",
		flap: true, restart: true,
	}} {
		t.Run(tt.name, func(t *testing.T) {
			w := newModelFixture()
			desired := streamA(testTarget("x1", plan.Serving, plan.Serving), testTarget("x2", plan.Serving))
			w.settle(desired, false)
			w.k.linkGoes(false)
			if !tt.flap {
				w.notice(2)
				w.settle(desired, false)
				w.expect(t, "a")
				if d := w.e.drift(); len(d) > 0 {
					t.Fatalf("drift %+v", d)
				}
				if why := w.state().Unreachable[testTarget("x2", plan.Serving).IPs[0]]; why != "link eth1 is down" {
					t.Fatalf("reason %q", why)
				}
			}
			w.k.linkGoes(true)
			if tt.restart {
				w.restart()
			} else {
				w.notice(2)
			}
			w.settle(desired, false)
			w.expect(t, "a", "x1", "x2")
			if d := w.e.drift(); len(d) > 0 || len(w.e.lost) > 0 {
				t.Fatalf("drift %+v, lost %v", d, w.e.lost)
			}
		})
	}
}

// A route that another process restored after its link came up is not lost: its next removal is
// drift.
func TestRouteRestoredByAnotherIsNotLost(t *testing.T) {
	w := newModelFixture()
	desired := streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving))
	w.settle(desired, false)
	w.e.holds.until["a"] = time.Time{}
	before := *w.slot("a", "x1")
	w.k.linkGoes(false)
	w.notice(2)
	w.settle(desired, false)
	*w.slot("a", "x1") = before
	w.k.linkGoes(true)
	w.notice(2)
	w.settle(desired, false)
	w.slot("a", "x1").NextHops[vip.IPv4] = netip.Addr{}
	w.e.stale |= routes
	w.settle(desired, false)
	w.expect(t, "a", "x2")
	if d := w.e.drift(); len(d) != 1 {
		t.Errorf("drift %+v", d)
	}
}

// A VIP is not assigned while it is an address of the namespace.
func TestVIPThatBecomesLocal(t *testing.T) {
	w := newModelFixture()
	desired := desiredOf(testStream("a", []string{"20.0.0.1/32", "20.0.0.2/32"}, testTarget("x1", plan.Serving)))
	local, object := netip.MustParseAddr("20.0.0.1"), "VIP 20.0.0.1/32"
	for _, is := range []bool{false, true, false} {
		if clear(w.k.net.LocalAddrs); is {
			w.k.net.LocalAddrs[local] = struct{}{}
		}
		w.e.stale |= network
		w.settle(desired, false)
		_, assigned := w.state().VIPs[vip.Require("20.0.0.1/32")]
		if _, reported := w.problem(object); assigned == is || reported != is || len(w.state().VIPs) == 0 {
			t.Errorf("local %t: assigned %t, reported %t", is, assigned, reported)
		}
	}
}

// VIPs are assigned again only if an address or a local route changed, not for each neighbor.
func TestVIPsAreAssignedOnce(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(network *plan.Network)
		same   bool
	}{
		{"neighbor", func(network *plan.Network) {
			network.FailedNeighbors[netip.MustParseAddr("10.0.0.9")] = struct{}{}
		}, true},
		{"address", func(network *plan.Network) {
			network.LocalAddrs[netip.MustParseAddr("20.0.0.1")] = struct{}{}
		}, false},
		{"local route", func(network *plan.Network) {
			network.LocalRoutes = []plan.LocalRoute{{Prefix: netip.MustParsePrefix("20.0.0.0/24")}}
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newModelFixture()
			w.settle(desiredOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving))), false)
			tt.change(&w.k.net)
			w.notice()
			if w.e.observe(true); w.e.vipsAssigned() != tt.same {
				t.Errorf("assigned: %t, want %t", !tt.same, tt.same)
			}
		})
	}
}

// Policy rules of different options are removed once the kernel has the desired state. A failed
// removal is retried.
func TestOldRulesAreRemovedOnce(t *testing.T) {
	w := newModelFixture()
	desired := streamA(testTarget("x1", plan.Serving))
	w.k.refuse, w.k.oldRulesErr = "a", errors.New("busy")
	for _, want := range []int{0, 1, 2, 2} {
		w.settle(desired, false)
		if w.e.removeOldRules(); w.k.oldRules != want {
			t.Errorf("tried %d times, want %d", w.k.oldRules, want)
		}
		if w.k.refuse = ""; want == 1 {
			w.k.oldRulesErr = nil
		}
	}
}

func TestRemovedRouteOfHeldStreamStays(t *testing.T) {
	w := newModelFixture()
	desired := streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving))
	w.settle(desired, false)
	w.e.holds.until["a"] = time.Time{}
	w.slot("a", "x2").NextHops[vip.IPv4] = netip.Addr{}
	w.e.stale |= routes
	w.settle(desired, false)
	w.expect(t, "a", "x1")
	// A changed desired state of a different target does not repair it.
	desired = streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving), testTarget("x3", plan.Serving))
	w.settle(desired, false)
	w.expect(t, "a", "x1", "x3")
	// A changed desired state of the target repairs it.
	w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Draining),
		testTarget("x3", plan.Serving)), false)
	if d := w.e.drift(); len(d) > 0 {
		t.Fatalf("drift %+v", d)
	}
}

func TestTakenFWMarksAreSkipped(t *testing.T) {
	w := newModelFixture()
	w.k.inUse[5000] = "route default via 10.9.9.9 table 5000"
	w.k.Targets[5001] = &plan.KernelTarget{FWMark: 5001, ChainIntact: true}
	w.notice()
	w.settle(streamA(testTarget("x1", plan.Serving)), false)
	if n := w.number("a", "x1"); n != 5002 {
		t.Fatalf("number %d", n)
	}
	for _, n := range []int{5000, 5001} {
		if p, ok := w.problem(fmt.Sprintf("fwmark %d", n)); !ok {
			t.Errorf("no problem for %d: %+v", n, p)
		}
	}
	if s := w.k.Targets[5001]; s == nil || s.Stream != "" {
		t.Fatal("a foreign chain was changed")
	}
}

func TestFailedStreamDoesNotBlockOthers(t *testing.T) {
	w := newModelFixture()
	w.k.refuse = "b"
	desired := desiredOf(
		testStream("a", []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving)),
		testStream("b", []string{"20.0.0.2/32"}, testTarget("x1", plan.Serving)),
		testStream("c", []string{"20.0.0.3/32"}, testTarget("x1", plan.Serving)),
	)
	w.settle(desired, false)
	w.expect(t, "a", "x1")
	w.expect(t, "c", "x1")
	p, ok := w.problem("stream b")
	if !ok || !strings.Contains(p.Detail, "is refused") || len(p.VIPs) != 1 || !w.e.failing() {
		t.Fatalf("problems %+v", w.state().Problems)
	}
	if w.state().VIPs[vip.Require("20.0.0.2/32")] != "" {
		t.Fatal("its VIP is said to be served")
	}
	w.k.refuse = ""
	w.settle(desired, false)
	w.expect(t, "b", "x1")
	if s := w.state(); len(s.Problems) > 0 || w.e.failing() {
		t.Fatalf("problems %+v", s.Problems)
	}
}

func TestVIPMovesInOneTransaction(t *testing.T) {
	w := newModelFixture()
	a, b := testTarget("x1", plan.Serving), testTarget("y1", plan.Serving)
	w.settle(desiredOf(testStream("a", []string{"20.0.0.1/32", "20.0.0.2/32"}, a),
		testStream("b", []string{"20.0.0.3/32"}, b)), false)
	writes := w.k.writes
	w.settle(desiredOf(testStream("a", []string{"20.0.0.2/32"}, a),
		testStream("b", []string{"20.0.0.1/32", "20.0.0.3/32"}, b)), false)
	if w.k.VIPs[vip.Require("20.0.0.1/32")] != "b" || w.k.writes != writes+1 {
		t.Fatalf("VIPs %v after %d transactions", w.k.VIPs, w.k.writes-writes)
	}
	// A stream that is removed loses its VIP, too.
	writes = w.k.writes
	w.settle(desiredOf(testStream("b", []string{"20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32"}, b)), false)
	if w.k.VIPs[vip.Require("20.0.0.2/32")] != "b" || w.k.writes != writes+1 || w.k.Streams["a"] != nil {
		t.Fatalf("VIPs %v after %d transactions", w.k.VIPs, w.k.writes-writes)
	}
}

func TestForeignChainBlocksStream(t *testing.T) {
	w := newModelFixture()
	w.k.Base = true
	w.k.Streams["a"] = &plan.KernelStream{Name: "a"}
	w.notice()
	w.settle(desiredOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving)),
		testStream("b", []string{"20.0.0.2/32"}, testTarget("x1", plan.Serving))), false)
	w.expect(t, "b", "x1")
	if p, ok := w.problem("chain inet vipgate-lb stream/a"); !ok || len(p.VIPs) != 1 {
		t.Fatalf("problems %+v", w.state().Problems)
	}
	if w.k.Streams["a"].ChainIntact || len(w.k.VIPs) != 1 {
		t.Fatal("a foreign chain was changed")
	}
}

func TestForeignElementOfHeldStreamStays(t *testing.T) {
	w := newModelFixture()
	v := vip.Require("20.0.0.1/32")
	w.k.Base = true
	w.k.Streams["other"] = &plan.KernelStream{Name: "other"}
	w.k.VIPs[v] = "other"
	w.notice()
	desired := desiredOf(testStream("a", []string{v.String()}, testTarget("x1", plan.Serving)))
	w.e.holds.until["a"] = time.Time{}
	w.settle(desired, false)
	if d := w.e.drift(); w.k.VIPs[v] != "other" || len(d) != 1 || d[0].Detail != "it leads to stream other" ||
		w.state().VIPs[v] != "" {
		t.Fatalf("drift %+v, VIPs %v", d, w.k.VIPs)
	}
	delete(w.e.holds.until, "a")
	if _, err := w.e.reconcile(desired); err != nil || w.k.VIPs[v] != "a" {
		t.Fatalf("resume: %v; VIPs %v", err, w.k.VIPs)
	}
}

func TestUnconnectedTargetIsRetried(t *testing.T) {
	w := newModelFixture()
	far := testTarget("x2", plan.Serving)
	far.IPs[0] = netip.MustParseAddr("192.0.2.1")
	desired := streamA(testTarget("x1", plan.Serving), far)
	w.settle(desired, false)
	w.expect(t, "a", "x1")
	if p, ok := w.problem("target a/x2"); !ok || !w.e.failing() {
		t.Fatalf("problem %+v", p)
	}
	if w.e.targets[w.number("a", "x2")].Stage != plan.StagePending ||
		w.e.streams["a"].installed.Stage != plan.StageApplied {
		t.Fatalf("records %+v", w.e.targets)
	}
	w.k.net.Links = append(w.k.net.Links,
		plan.Link{Name: "eth2", Index: 3, Up: true, Prefixes: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	w.e.stale |= network
	w.settle(desired, false)
	w.expect(t, "a", "x1", "x2")
	if len(w.state().Problems) > 0 {
		t.Fatalf("problems %+v", w.state().Problems)
	}
}

func TestReconcileBeforeFirstConfigure(t *testing.T) {
	w := newModelFixture()
	if _, err := w.e.reconcile(nil); err == nil {
		t.Fatal("no error")
	}
}

func TestNoChangeBeforeFirstConfigure(t *testing.T) {
	w := newModelFixture()
	w.settle(streamA(testTarget("x1", plan.Serving), testTarget("x2", plan.Serving)), false)
	w.settle(streamA(testTarget("x1", plan.Serving)), false)
	w.clock = w.clock.Add(time.Hour)
	writes := w.k.writes
	w.restart()
	w.notice()
	w.settle(nil, false)
	s := w.state()
	if _, ok := s.Streams["a"].Serving[vip.IPv4]["x1"]; !ok || s.VIPs[vip.Require("20.0.0.1/32")] != "a" ||
		w.k.writes != writes || len(w.k.Targets) != 2 {
		t.Fatalf("state %+v, slots %+v", s.Streams["a"], w.k.Targets)
	}
}

// The loss of chain checks is drift of its own: it detaches no fast path, and its back-off delays no
// other repair.
func TestLostChecksDelayNothing(t *testing.T) {
	const checksObject = "chain inet vipgate-lb checks"
	w := newModelFixture()
	desired := streamA(testTarget("x1", plan.Serving))
	w.settle(desired, false)
	for range 2 {
		w.k.unchecked = true
		w.notice()
		w.e.observe(true)
		if drift, doubt := w.e.drift(), w.e.doubt(); len(drift) != 1 || drift[0].Object != checksObject || doubt != "" {
			t.Errorf("drift %+v, fast path off: %q", drift, doubt)
		}
		w.e.converge(desired, false)
	}
	if !w.k.unchecked {
		t.Error("the second repair does not wait")
	}
	w.k.unruled = true
	w.notice()
	w.e.observe(true)
	if doubt := w.e.doubt(); doubt != kernelUnconfirmed {
		t.Errorf("without policy rules: %q", doubt)
	}
	if w.e.converge(desired, false); w.k.unruled || w.k.unchecked {
		t.Errorf("policy rules missing: %v, checks: %v", w.k.unruled, w.k.unchecked)
	}
}

func TestCommonRulesComeBack(t *testing.T) {
	vips, x1, x2 := []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving), testTarget("x2", plan.Serving)
	t.Run("before the rules of a new target", func(t *testing.T) {
		w := newModelFixture()
		w.settle(desiredOf(testStream("a", vips, x1)), false)
		w.k.unruled = true
		w.notice()
		w.k.left = 1
		if w.settle(desiredOf(testStream("a", vips, x1, x2)), false) || w.k.unruled || len(w.k.Targets) != 1 {
			t.Fatalf("first act: common rules missing %v, targets %v", w.k.unruled, w.k.Targets)
		}
	})
	t.Run("before the first desired state", func(t *testing.T) {
		w := newModelFixture()
		w.settle(desiredOf(testStream("a", vips, x1)), false)
		w.k.unruled = true
		w.restart()
		routes := desiredOf(testStream("a", vips, x1, x2))
		routes.RoutesOnly = true
		w.e.routeOnly(routes)
		if w.k.unruled || len(w.k.Targets) != 2 {
			t.Fatalf("common rules missing %v, targets %v", w.k.unruled, w.k.Targets)
		}
	})
}
