package lb

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestTargetCountsOnceTheKernelHasConfirmedIt(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA, vip6)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1", "fd00::1"), member("b", "172.16.0.2")},
	})
	p.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Unknown)
	p.wantRole("s", "b", vip.IPv6, dataplane.Down) // it has no such address
	p.health("s", "a", healthcheck.Ready)
	if got := p.want(vipA, readiness.NotReady, reasonDataPlane, 0, 2); got.Detail != "not confirmed by the kernel yet" {
		t.Errorf("detail %q", got.Detail)
	}
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)

	// The target is in the kernel, the VIP is not.
	state := forward(dataplane.State{}, p.plane.last())
	delete(state.VIPs, vipA)
	p.hear(state)
	p.want(vipA, readiness.NotReady, reasonDataPlane, 1, 2)
	p.want(vip6, readiness.Ready, reasonReady, 1, 1)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)

	// Another process removes it from the kernel.
	state = forward(dataplane.State{}, p.plane.last())
	delete(state.Streams["s"].Serving[vip.IPv4], "a")
	state.Streams["s"].Problem[vip.IPv4] = "rule fwmark 5000 is missing"
	p.hear(state)
	if got := p.want(vipA, readiness.NotReady, reasonDataPlane, 0, 2); got.Detail != "stream s: rule fwmark 5000 is missing" {
		t.Errorf("detail %q", got.Detail)
	}
	p.want(vip6, readiness.Ready, reasonReady, 1, 1)
}

func TestVIPThatIsNotForwardedSaysWhy(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA)), map[string][]targetset.Member{"s": {member("a", "172.16.0.1")}})
	p.health("s", "a", healthcheck.Ready)
	state := forward(dataplane.State{}, p.plane.last())
	delete(state.VIPs, vipA)
	for _, c := range []struct {
		want   string
		change func(*dataplane.State)
	}{
		{"no space left on device", func(s *dataplane.State) { s.Err = errors.New("no space left on device") }},
		{"no space left on device, again", func(s *dataplane.State) { s.Err = errors.New("no space left on device, again") }},
		{"stream s: no hash", func(s *dataplane.State) {
			s.Streams["s"] = &dataplane.StreamState{Problem: [2]string{"no hash", ""}}
		}},
		{"VIP 20.0.0.1/32: is an address of eth0", func(s *dataplane.State) {
			s.Problems = []dataplane.Problem{{Object: "VIP 20.0.0.1/32", Detail: "is an address of eth0", VIPs: []vip.VIP{vipA}}}
		}},
		{strings.Repeat("x", maxDetail-3) + "...", func(s *dataplane.State) { s.Err = errors.New(strings.Repeat("x", 500)) }},
	} {
		s := state
		s.Streams = maps.Clone(state.Streams)
		c.change(&s)
		p.hear(s)
		if got := p.a.current[vipA]; got.Reason != reasonDataPlane || got.Detail != c.want {
			t.Errorf("%v: %q, want %q", got.Reason, got.Detail, c.want)
		}
	}
	p.hear(state)
	if got := p.a.current[vipA]; got.Detail != "not confirmed by the kernel yet" {
		t.Errorf("detail %q", got.Detail)
	}
}

// The order is: not ready, withdrawn, removed.
func TestLastTargetLeavesTheKernelOnlyAfterTheFrontendWithdrew(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "a", healthcheck.NotReady)
	p.wantRole("s", "a", vip.IPv4, dataplane.Down) // another one is there: nothing to wait for
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)
	told := len(p.plane.wanted)

	p.health("s", "b", healthcheck.NotReady)
	p.want(vipA, readiness.NotReady, reasonTooFew, 0, 2)
	p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
	p.wantRole("s", "b", vip.IPv6, dataplane.Serving)
	if p.f.reported == nil || p.f.next.IsZero() {
		t.Error("something is held back, and the loop waits for nothing")
	}
	at := p.table.Position().Revision
	p.frontend.say(p.now, "lb", at-1) // from before it heard of it
	p.later(time.Millisecond)
	p.frontend.say(p.now, "another lb", at)
	p.later(time.Millisecond)
	p.frontend.say(p.now, "lb", at, vipA, vip6)
	p.later(time.Millisecond)
	if len(p.plane.wanted) != told {
		t.Fatalf("the data plane was configured before the frontend had withdrawn")
	}
	p.frontend.say(p.now, "lb", at, vipA)
	p.later(time.Millisecond)
	p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
	p.wantRole("s", "b", vip.IPv6, dataplane.Down)
	p.frontend.say(p.now, "lb", at)
	p.later(time.Millisecond)
	p.wantRole("s", "b", vip.IPv4, dataplane.Down)
	if p.f.reported != nil || !p.f.next.IsZero() || len(p.f.pending) != 0 {
		t.Error("nothing is held back, and the loop waits for something")
	}
	p.confirm()
	p.want(vipA, readiness.NotReady, reasonTooFew, 0, 2)
}

// A VIP that is de-preferred still attracts traffic from gateways without another path.
func TestDepreferredVIPKeepsItsLastTarget(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "a", healthcheck.NotReady)
	p.confirm()
	p.health("s", "b", healthcheck.NotReady)
	p.frontend.advertise(readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED)
	p.reports(vipA)
	p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
	p.wantRole("s", "b", vip.IPv6, dataplane.Down)
	p.reports()
	p.wantRole("s", "b", vip.IPv4, dataplane.Down)
}

// A report from before the decision about the VIP that joins says nothing of it, and
// the frontend gets its full time to withdraw.
func TestVIPThatJoinsAHoldIsWaitedFor(t *testing.T) {
	join := func(t *testing.T) (p *planeRig, before uint64) {
		p = newPlaneRig(t, trenchOf(streamOf("s", vipA, vipB)), map[string][]targetset.Member{"s": {member("a", "172.16.0.1")}})
		p.health("s", "a", healthcheck.Ready)
		p.confirm()
		p.reports(vipA, vipB)
		p.configure(trenchOf(streamOf("s", vipB)))
		before = p.table.Position().Revision
		p.later(testPatience)
		p.health("s", "a", healthcheck.NotReady)
		p.want(vipB, readiness.NotReady, reasonTooFew, 0, 1)
		if h := p.f.holds[holdKey{"s", vip.IPv4}]; h == nil || len(h.vips) != 2 {
			t.Fatalf("not both VIPs are held: %+v", h)
		}
		return p, before
	}
	t.Run("revision", func(t *testing.T) {
		p, before := join(t)
		p.frontend.say(p.now, "lb", before)
		p.later(time.Millisecond)
		p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
		p.reports()
		p.wantRole("s", "a", vip.IPv4, dataplane.Down)
	})
	t.Run("patience", func(t *testing.T) {
		p, _ := join(t)
		p.later(testPatience + stopMargin - 1)
		p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
		p.later(1)
		p.wantRole("s", "a", vip.IPv4, dataplane.Down)
	})
}

func TestWaitsAreBounded(t *testing.T) {
	t.Run("a frontend that does not withdraw", func(t *testing.T) {
		p := twoTargets(t)
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		ends := p.now.Add(testPatience + stopMargin)
		if !p.f.next.Equal(ends) {
			t.Errorf("the loop wakes up in %v", p.f.next.Sub(p.now))
		}
		p.reports(vipA, vip6)
		p.later(ends.Sub(p.now) - 1)
		p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, dataplane.Down)
	})
	t.Run("a frontend that is gone", func(t *testing.T) {
		p := twoTargets(t)
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		p.later(100 * time.Millisecond)
		r := p.frontend.report.Load()
		r.Connected, r.At = false, p.now
		p.frontend.report.Set(r)
		p.later(reporterGone - 1)
		p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, dataplane.Down)
	})
	t.Run("no frontend at all", func(t *testing.T) {
		p := twoTargets(t)
		p.frontend.report.Set(readiness.Report{})
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		p.later(reporterGone - 1)
		p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, dataplane.Down)
	})
}

func TestTargetThatReturnsEndsTheWait(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "b", healthcheck.NotReady)
	p.confirm()
	p.health("s", "a", healthcheck.NotReady)
	p.health("s", "b", healthcheck.Ready)
	// b is not in the kernel yet, so that a still serves.
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
	p.want(vipA, readiness.NotReady, reasonDataPlane, 0, 2)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Down)
	if len(p.f.holds) != 0 || len(p.f.pending) != 0 {
		t.Errorf("still held back: %v, %v", p.f.holds, p.f.pending)
	}
}

func TestStreamThatIsRemovedServesUntilItsVIPsAreWithdrawn(t *testing.T) {
	p := twoTargets(t)
	p.members["t"] = []targetset.Member{member("c", "172.16.0.3")}
	p.configure(trenchOf(streamOf("t", vipB)))
	if _, there := p.a.current[vipA]; there {
		t.Error("the VIP is not removed")
	}
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	if got := p.plane.last().Streams["s"].VIPs; !slices.Equal(got, []vip.VIP{vipA, vip6}) {
		t.Errorf("VIPs %v", got)
	}
	if _, there := p.role("t", "c", vip.IPv4); !there {
		t.Error("another stream has to wait")
	}
	p.confirm()
	p.reports() // VIPs of which a complete report says nothing are not advertised
	if p.plane.last().Streams["s"] != nil {
		t.Error("the stream is still there")
	}
}

func TestVIPThatIsRemovedIsForwardedUntilItIsWithdrawn(t *testing.T) {
	p := twoTargets(t)
	p.configure(trenchOf(streamOf("s", vip6)))
	if got := p.plane.last().Streams["s"].VIPs; !slices.Equal(got, []vip.VIP{vip6, vipA}) {
		t.Errorf("VIPs %v", got)
	}
	p.reports(vipA, vip6)
	p.want(vip6, readiness.Ready, reasonReady, 2, 2)
	p.reports(vip6)
	if got := p.plane.last().Streams["s"].VIPs; !slices.Equal(got, []vip.VIP{vip6}) {
		t.Errorf("VIPs %v", got)
	}
}

// A planned change: neither the kernel nor the frontend sees a moment without.
func TestVIPThatMovesToAStreamThatServesStaysReady(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.reports(vipA, vipB)
	revision, told := p.table.Position().Revision, len(p.plane.wanted)
	c := trenchOf(streamOf("s", vipB), streamOf("t", vipA))
	p.configure(c)
	if len(p.plane.wanted) != told+1 {
		t.Fatalf("configured %d times", len(p.plane.wanted)-told)
	}
	for name, want := range map[string]vip.VIP{"s": vipB, "t": vipA} {
		if got := p.plane.last().Streams[name].VIPs; !slices.Equal(got, []vip.VIP{want}) {
			t.Errorf("stream %s has %v", name, got)
		}
	}
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 1)
	p.want(vipB, readiness.Ready, reasonReady, 1, 1)
	if p.table.Position().Revision != revision {
		t.Error("the frontend was sent something meanwhile")
	}
}

func TestVIPThatMovesToAStreamThatDoesNotServeIsWithdrawnFirst(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA, vip6), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.reports(vipA)
	p.configure(trenchOf(streamOf("s", vip6), streamOf("t", vipA, vipB)))
	p.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 1)
	if s, u := p.plane.last().Streams["s"].VIPs, p.plane.last().Streams["t"].VIPs; !slices.Contains(s, vipA) || slices.Contains(u, vipA) {
		t.Errorf("s has %v, t %v", s, u)
	}
	p.reports()
	if s, u := p.plane.last().Streams["s"].VIPs, p.plane.last().Streams["t"].VIPs; slices.Contains(s, vipA) || !slices.Contains(u, vipA) {
		t.Errorf("s has %v, t %v", s, u)
	}
	p.confirm()
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 1)
}

func TestTargetThatCannotBeReachedIsOutBeforeItsChecks(t *testing.T) {
	p := twoTargets(t)
	state := forward(p.a.kernel.state, p.plane.last())
	state.Unreachable = map[netip.Addr]string{netip.MustParseAddr("172.16.0.1"): "neighbour 172.16.0.1 does not answer"}
	p.hear(state)
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)
	p.want(vip6, readiness.Ready, reasonReady, 2, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Down)
	p.wantRole("s", "a", vip.IPv6, dataplane.Serving)
	p.confirm()
	state = forward(p.a.kernel.state, p.plane.last())
	state.Unreachable = map[netip.Addr]string{
		netip.MustParseAddr("172.16.0.1"): "neighbour 172.16.0.1 does not answer", netip.MustParseAddr("172.16.0.2"): "link eth1 is down",
	}
	p.hear(state)
	got := p.want(vipA, readiness.NotReady, reasonTooFew, 0, 2)
	if !strings.Contains(got.Detail, "a (172.16.0.1): neighbour 172.16.0.1 does not answer") {
		t.Errorf("detail %q", got.Detail)
	}
	p.wantRole("s", "b", vip.IPv4, dataplane.Serving) // until it is withdrawn
	state.Unreachable = nil
	p.hear(state)
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 2, 2)

	p.a.kernel.patient = true
	state = forward(p.a.kernel.state, p.plane.last())
	state.Unreachable = map[netip.Addr]string{netip.MustParseAddr("172.16.0.1"): "neighbour 172.16.0.1 does not answer"}
	p.hear(state)
	p.want(vipA, readiness.Ready, reasonReady, 2, 2)
}

func TestOfTwoStreamsOnlyTheOneThatTheKernelForwardsToCounts(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("one", vipA), streamOf("two", vipA)), map[string][]targetset.Member{
		"one": {member("a", "172.16.0.1")}, "two": {member("b", "172.16.0.2"), member("c", "172.16.0.3")},
	})
	p.health("two", "b", healthcheck.Ready)
	p.health("two", "c", healthcheck.Ready)
	p.confirm()
	got := p.want(vipA, readiness.NotReady, reasonDataPlane, 0, 1)
	if !strings.HasPrefix(got.Detail, "of its streams only one, whose name sorts first, is forwarded to; stream one: 0 of 1 targets ready") {
		t.Errorf("detail %q", got.Detail)
	}
	p.health("one", "a", healthcheck.Ready)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 1)
}

func TestRestartLeavesTheKernelAsItIs(t *testing.T) {
	before := dataplane.State{
		Streams: map[string]*dataplane.StreamState{"s": {Serving: [2]map[string]struct{}{{"a": {}, "gone": {}}, {}}}},
		VIPs:    map[vip.VIP]string{vipA: "s"},
	}
	p := &planeRig{
		rig:   &rig{t, newAggregate(outage.New(outage.Options{})), time.Now(), map[string][]targetset.Member{"s": {member("a", "172.16.0.1"), member("b", "172.16.0.2")}}},
		plane: &scriptedPlane{ready: make(chan struct{})}, frontend: &scriptedFrontend{},
		table: readiness.NewTable(readiness.TableOptions{InstanceID: "lb"}),
	}
	p.a.kernel = &kernelView{state: before}
	p.f = newForwarding(p.plane, p.frontend, p.table.Position, testPatience, quiet)
	config := trenchOf(streamOf("s", vipA))
	touched, _ := p.a.configure(time.Now(), config, p.of)
	p.a.apply(healthcheck.Evaluation{Changed: []healthcheck.Health{{Key: healthcheck.Key{Stream: "s", Name: "a", Addr: netip.MustParseAddr("172.16.0.1")}, State: healthcheck.Ready}}}, touched)
	p.decide(touched, nil)
	// a stayed, so that nothing has to be withdrawn; b is not known yet.
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	p.wantRole("s", "b", vip.IPv4, dataplane.Unknown)
}

func TestVanishedLastTargetLeavesAfterWithdrawal(t *testing.T) {
	for name, now := range map[string]struct {
		config *trench.Config
		ends   func(*planeRig)
	}{
		"another target":       {trenchOf(streamOf("s", vipA)), func(p *planeRig) { p.reports() }},
		"no such stream":       {trenchOf(streamOf("t", vipA)), func(p *planeRig) { p.reports() }},
		"no such VIP":          {trenchOf(streamOf("s", vipB)), func(p *planeRig) { p.reports() }},
		"no frontend connects": {trenchOf(streamOf("s", vipA)), func(p *planeRig) { p.later(testPatience + stopMargin) }},
	} {
		t.Run(name, func(t *testing.T) {
			p := &planeRig{
				rig:   &rig{t, newAggregate(outage.New(outage.Options{})), time.Now(), map[string][]targetset.Member{"s": {member("b", "172.16.0.2")}}},
				plane: &scriptedPlane{ready: make(chan struct{})}, frontend: &scriptedFrontend{},
				table: readiness.NewTable(readiness.TableOptions{InstanceID: "lb"}),
			}
			p.a.kernel = &kernelView{state: dataplane.State{
				Streams: map[string]*dataplane.StreamState{"s": {Serving: [2]map[string]struct{}{{"a": {}}, {}}}},
				VIPs:    map[vip.VIP]string{vipA: "s"},
			}}
			p.f = newForwarding(p.plane, p.frontend, p.table.Position, testPatience, quiet)
			p.configure(now.config)
			p.health("s", "b", healthcheck.NotReady)
			p.later(reporterGone)
			if p.plane.last() != nil {
				t.Fatal("the kernel was changed before the frontend withdrew")
			}
			now.ends(p)
			if p.plane.last() == nil {
				t.Fatal("still held back")
			}
		})
	}
}

func TestDrainingTargetsServeWithoutOthers(t *testing.T) {
	p := twoTargets(t)
	p.drains("s", "a", time.Minute)
	p.wantRole("s", "a", vip.IPv4, dataplane.Draining)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)
	p.drains("s", "b", 2*time.Minute)
	got := p.want(vipA, readiness.Draining, reasonDraining, 0, 2)
	if !got.DrainEnd.Equal(p.now.Add(2 * time.Minute)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(p.now))
	}
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	p.wantRole("s", "b", vip.IPv4, dataplane.Serving)
	p.confirm()
	p.health("s", "b", healthcheck.NotReady)
	p.wantRole("s", "b", vip.IPv4, dataplane.Down)
	p.confirm()
	p.want(vipA, readiness.Draining, reasonDraining, 0, 2)
	p.drains("s", "a", -1)
	p.want(vipA, readiness.NotReady, reasonTooFew, 0, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving) // until it is withdrawn
	p.reports()
	p.wantRole("s", "a", vip.IPv4, dataplane.Down)
}

// The old target drains at the moment in which the new one is ready: nothing is
// about to end, and no peer learns that.
func TestTargetThatDrainsServesUntilItsSuccessorIsConfirmed(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA)), map[string][]targetset.Member{"s": {member("a", "172.16.0.1"), member("b", "172.16.0.2")}})
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.health("s", "b", healthcheck.Ready) // not confirmed
	p.drains("s", "a", time.Minute)
	p.want(vipA, readiness.Ready, reasonReady, 0, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	p.confirm()
	p.want(vipA, readiness.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a", vip.IPv4, dataplane.Draining)

	// If the kernel cannot take the successor, the drain is one.
	p.members["s"] = append(p.members["s"], member("c", "172.16.0.3"))
	p.retarget("s")
	p.health("s", "c", healthcheck.Ready)
	state := forward(p.a.kernel.state, p.plane.last())
	delete(state.Streams["s"].Serving[vip.IPv4], "c")
	state.Streams["s"].Problem[vip.IPv4] = "no number is free"
	p.hear(state)
	p.drains("s", "b", time.Minute)
	p.want(vipA, readiness.Draining, reasonDraining, 0, 3)
}

func TestRoles(t *testing.T) {
	for _, c := range []struct {
		name     string
		health   healthcheck.State
		draining healthcheck.State
		want     dataplane.Role
	}{
		{"not checked", healthcheck.Starting, healthcheck.Ready, dataplane.Unknown},
		{"ready", healthcheck.Ready, healthcheck.Ready, dataplane.Serving},
		{"dead", healthcheck.NotReady, healthcheck.Ready, dataplane.Down},
		{"not asked in time", healthcheck.Overdue, healthcheck.Ready, dataplane.Unknown},
		{"draining", healthcheck.Ready, healthcheck.Draining, dataplane.Draining},
		{"draining, not checked", healthcheck.Starting, healthcheck.Draining, dataplane.Unknown},
		{"draining, dead", healthcheck.NotReady, healthcheck.Draining, dataplane.Down},
		{"draining, not asked in time", healthcheck.Overdue, healthcheck.Draining, dataplane.Draining},
		{"drained by an operator", healthcheck.Ready, healthcheck.Drained, dataplane.Down},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPlaneRig(t, trenchOf(streamOf("s", vipA)), map[string][]targetset.Member{"s": {member("a", "172.16.0.1"), member("other", "172.16.0.2")}})
			p.health("s", "other", healthcheck.Ready)
			p.confirm()
			p.members["s"][0].Draining, p.members["s"][0].DrainEnd = c.draining, p.now.Add(time.Minute)
			p.retarget("s")
			p.health("s", "a", c.health)
			p.wantRole("s", "a", vip.IPv4, c.want)
		})
	}
}

func TestStreamThatDidNotChangeIsTheSameOne(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	before := p.plane.last()
	p.health("t", "b", healthcheck.Ready)
	now := p.plane.last()
	if now.Revision != before.Revision+1 || now.Streams["s"] != before.Streams["s"] || now.Streams["t"] == before.Streams["t"] {
		t.Errorf("revision %d after %d", now.Revision, before.Revision)
	}
	told := len(p.plane.wanted)
	p.configure(trenchOf(streamOf("s", vipA), streamOf("t", vipB))) // the same, read again
	p.confirm()
	p.later(time.Second)
	if len(p.plane.wanted) != told {
		t.Error("the data plane got what it has")
	}
}

func TestOneTargetOfAName(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA)), map[string][]targetset.Member{"s": {member("a", "172.16.0.1"), member("b", "172.16.0.9")}})
	p.health("s", "a", healthcheck.Ready)
	p.health("s", "b", healthcheck.Ready)
	p.confirm()
	leaves := member("a", "172.16.0.1")
	leaves.Draining, leaves.DrainEnd = healthcheck.Draining, p.now.Add(time.Minute)
	p.members["s"] = []targetset.Member{member("a", "172.16.0.2"), member("b", "172.16.0.9"), leaves}
	p.retarget("s")
	var got []string
	for _, x := range p.plane.last().Streams["s"].Targets {
		got = append(got, fmt.Sprintf("%s %s %d", x.Name, x.IPs, x.Roles[vip.IPv4]))
	}
	// What the kernel has of the name leads to the old address.
	if want := []string{"a [172.16.0.2] 1", "b [172.16.0.9] 3"}; !slices.Equal(got, want) {
		t.Errorf("targets %q, want %q", got, want)
	}
	p.want(vipA, readiness.Ready, reasonReady, 1, 3)
}

// The kernel lags behind: what it has of an older order is about to go, and does not
// count although it is wanted again.
func TestRevokedDataPlaneStateDoesNotCount(t *testing.T) {
	p := newPlaneRig(t, trenchOf(streamOf("s", vipA)), map[string][]targetset.Member{"s": {member("a", "172.16.0.1")}})
	p.health("s", "a", healthcheck.Ready)
	first := forward(dataplane.State{}, p.plane.last())
	p.drains("s", "a", -1)
	p.drains("s", "a", time.Minute)
	p.wantRole("s", "a", vip.IPv4, dataplane.Serving)
	p.hear(first)
	p.want(vipA, readiness.NotReady, reasonDataPlane, 0, 1)
	p.hear(forward(first, p.plane.wanted[len(p.plane.wanted)-2]))
	p.want(vipA, readiness.NotReady, reasonDataPlane, 0, 1)
	p.confirm()
	p.want(vipA, readiness.Draining, reasonDraining, 0, 1)
	if len(p.a.kernel.doubts) != 0 {
		t.Errorf("still in doubt: %v", p.a.kernel.doubts)
	}
}

// BenchmarkChangeAmongManyVIPs is what the loop pays for the data plane when one
// target dies and returns: 100 streams of 100 VIPs and 10 targets each.
func BenchmarkChangeAmongManyVIPs(b *testing.B) {
	const streams, vips, targets = 100, 100, 10
	members := map[string][]targetset.Member{}
	c := &trench.Config{}
	for i := range streams {
		s := streamOf(fmt.Sprintf("s%d", i))
		for j := range vips {
			s.VIPs = append(s.VIPs, vip.Require(fmt.Sprintf("20.0.%d.%d/32", i, j)))
		}
		c.Attractor.VIPs = append(c.Attractor.VIPs, s.VIPs...)
		c.Streams = append(c.Streams, s)
		for j := range targets {
			members[s.Name] = append(members[s.Name], member(fmt.Sprintf("t%d", j), fmt.Sprintf("172.16.%d.%d", i, j)))
		}
	}
	p := &planeRig{
		rig:   &rig{nil, newAggregate(outage.New(outage.Options{})), time.Now(), members},
		plane: &scriptedPlane{ready: make(chan struct{})}, frontend: &scriptedFrontend{},
		table: readiness.NewTable(readiness.TableOptions{InstanceID: "lb"}),
	}
	p.a.kernel = &kernelView{}
	p.f = newForwarding(p.plane, p.frontend, p.table.Position, testPatience, quiet)
	p.configure(c)
	for name, list := range members {
		for _, m := range list {
			p.health(name, m.Name, healthcheck.Ready)
		}
	}
	state := forward(p.a.kernel.state, p.plane.last())
	p.hear(state)
	b.Run("a target", func(b *testing.B) {
		for i := range b.N {
			p.health("s0", "t0", []healthcheck.State{healthcheck.NotReady, healthcheck.Ready}[i%2])
		}
	})
	b.Run("a state of the kernel", func(b *testing.B) {
		for range b.N {
			state.VIPs = maps.Clone(state.VIPs)
			p.hear(state)
		}
	})
	b.Run("nothing", func(b *testing.B) {
		for range b.N {
			p.later(time.Millisecond)
		}
	})
}
