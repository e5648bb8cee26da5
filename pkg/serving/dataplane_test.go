package serving

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
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestTargetCountsOnceConfirmed(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA, vip6)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1", "fd00::1"), member("b", "172.16.0.2")},
	})
	p.want(vipA, vip.NotReady, reasonNotChecked, 0, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Unknown)
	p.wantRole("s", "b", vip.IPv6, plan.Down) // it has no such address
	p.health("s", "a", healthcheck.Ready)
	if got := p.want(vipA, vip.NotReady, reasonDataPlane, 0, 2); got.Detail != "not confirmed by the kernel yet" {
		t.Errorf("detail %q", got.Detail)
	}
	p.wantRole("s", "a", vip.IPv4, plan.Serving)

	// The target is in the kernel, the VIP is not.
	state := applied(plan.State{}, p.last())
	delete(state.VIPs, vipA)
	p.confirmState(state)
	p.want(vipA, vip.NotReady, reasonDataPlane, 1, 2)
	p.want(vip6, vip.Ready, reasonReady, 1, 1)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 2)

	// Another process removes it from the kernel.
	state = applied(plan.State{}, p.last())
	delete(state.Streams["s"].Serving[vip.IPv4], "a")
	state.Streams["s"].Problem[vip.IPv4] = "rule fwmark 5000 is missing"
	p.confirmState(state)
	got := p.want(vipA, vip.NotReady, reasonDataPlane, 0, 2)
	if got.Detail != "stream s: rule fwmark 5000 is missing" {
		t.Errorf("detail %q", got.Detail)
	}
	p.want(vip6, vip.Ready, reasonReady, 1, 1)
}

func TestDetailOfVIPNotForwarded(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA)), targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	state := applied(plan.State{}, p.last())
	delete(state.VIPs, vipA)
	for _, c := range []struct {
		want   string
		change func(*plan.State)
	}{
		{"no space left on device", func(s *plan.State) { s.Err = errors.New("no space left on device") }},
		{"no space left on device, again", func(s *plan.State) { s.Err = errors.New("no space left on device, again") }},
		{"stream s: no hash", func(s *plan.State) {
			s.Streams["s"] = &plan.StreamState{Problem: [2]string{"no hash", ""}}
		}},
		{"stream s: no map", func(s *plan.State) {
			s.Streams["s"] = &plan.StreamState{Problem: [2]string{"no map", ""}}
		}},
		{"VIP 20.0.0.1/32: is an address of eth0", func(s *plan.State) {
			s.Problems = []plan.Problem{{Object: "VIP 20.0.0.1/32", Detail: "is an address of eth0", VIPs: []vip.VIP{vipA}}}
		}},
		{strings.Repeat("x", readiness.MaxDetailBytes), func(s *plan.State) {
			s.Err = errors.New(strings.Repeat("x", 500))
		}},
	} {
		s := state
		s.Streams = maps.Clone(state.Streams)
		c.change(&s)
		p.confirmState(s)
		if got := p.e.of(vipA); got.Reason != reasonDataPlane || got.Detail != c.want {
			t.Errorf("%v: %q, want %q", got.Reason, got.Detail, c.want)
		}
	}
	p.confirmState(state)
	if got := p.e.of(vipA); got.Detail != "not confirmed by the kernel yet" {
		t.Errorf("detail %q", got.Detail)
	}
}

// The VIPs of a withheld family are not ready, although the kernel has them and their targets.
func TestWithheldFamily(t *testing.T) {
	p := twoTargets(t)
	state := p.e.kernel.state
	state.Withheld[vip.IPv4] = "net.ipv4.ip_forward is 0"
	p.confirmState(state)
	if got := p.want(vipA, vip.NotReady, reasonDataPlane, 2, 2); got.Detail != state.Withheld[vip.IPv4] {
		t.Errorf("detail %q", got.Detail)
	}
	p.want(vip6, vip.Ready, reasonReady, 2, 2)
	state.Withheld = [len(vip.Families)]string{}
	p.confirmState(state)
	p.want(vipA, vip.Ready, reasonReady, 2, 2)
}

// A match is part of the next desired state, and no VIP waits for it.
func TestMatchOfStream(t *testing.T) {
	s, other := streamOf("s", vipA), streamOf("other", vipB)
	s.Match = []trench.Match{
		{Protocols: []string{"udp", "sctp"}, Ports: []uint16{53}}, {Protocols: []string{"tcp"}, Ports: []uint16{443, 80}},
	}
	p := startPlaneRig(t, trenchOf(s, other), targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	all := []plan.Port{
		{Protocol: 6, Number: 80}, {Protocol: 6, Number: 443}, {Protocol: 17, Number: 53}, {Protocol: 132, Number: 53},
	}
	wanted := [][]plan.Port{all, all[:2], nil, all}
	for i, match := range [][]trench.Match{s.Match, s.Match[1:], nil, s.Match} {
		before := p.last()
		s.Match = match
		p.configure(trenchOf(s, other))
		p.want(vipA, vip.Ready, reasonReady, 1, 1)
		is := p.last()
		if got := is.Streams["s"].Match; !plan.SameMatch(got, wanted[i]) {
			t.Errorf("match %v is desired as %v", match, got)
		}
		if is.Streams["other"] != before.Streams["other"] || is.Streams["other"].Match != nil {
			t.Error("another stream changed")
		}
	}
}

// The order is: not ready, withdrawn, removed.
func TestLastTargetLeavesAfterWithdrawal(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "a", healthcheck.NotReady)
	p.wantRole("s", "a", vip.IPv4, plan.Down) // another one is there: nothing to wait for
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	sent := len(p.sent)

	p.health("s", "b", healthcheck.NotReady)
	p.want(vipA, vip.NotReady, reasonTooFew, 0, 2)
	p.wantRole("s", "b", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv6, plan.Serving)
	if len(p.out.Held) == 0 || p.out.Next.IsZero() {
		t.Error("something is held back, and the loop waits for nothing")
	}
	at := p.table.Position().Revision
	p.reportAt("lb", at-1) // older than the decision
	p.later(time.Millisecond)
	p.reportAt("another lb", at)
	p.later(time.Millisecond)
	p.reportAt("lb", at)
	p.report.Complete = false // it has not named the advertised VIPs yet
	p.later(time.Millisecond)
	p.reportAt("lb", at, vipA, vip6)
	p.later(time.Millisecond)
	if len(p.sent) != sent {
		t.Fatalf("the data plane was configured before the frontend had withdrawn")
	}
	p.reportAt("lb", at, vipA)
	p.later(time.Millisecond)
	p.wantRole("s", "b", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv6, plan.Down)
	p.reportAt("lb", at)
	p.later(time.Millisecond)
	p.wantRole("s", "b", vip.IPv4, plan.Down)
	if len(p.out.Held) != 0 || !p.out.Next.IsZero() {
		t.Error("nothing is held back, and the loop waits for something")
	}
	p.confirm()
	p.want(vipA, vip.NotReady, reasonTooFew, 0, 2)
}

// A de-preferred VIP still attracts traffic from gateways without another path.
func TestDepreferredVIPKeepsLastTarget(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "a", healthcheck.NotReady)
	p.confirm()
	p.health("s", "b", healthcheck.NotReady)
	p.as = readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
	p.reports(vipA)
	p.wantRole("s", "b", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv6, plan.Down)
	p.reports()
	p.wantRole("s", "b", vip.IPv4, plan.Down)
}

// A report from before the decision about the joining VIP does not cover it, and the
// frontend gets its full time to withdraw.
func TestVIPJoinsHold(t *testing.T) {
	join := func(t *testing.T) (p *planeRig, before uint64) {
		p = startPlaneRig(t, trenchOf(streamOf("s", vipA, vipB)), targets("s", member("a", "172.16.0.1")))
		p.health("s", "a", healthcheck.Ready)
		p.confirm()
		p.reports(vipA, vipB)
		p.configure(trenchOf(streamOf("s", vipB)))
		before = p.table.Position().Revision
		p.later(testWithdrawTime / 3)
		p.health("s", "a", healthcheck.NotReady)
		p.want(vipB, vip.NotReady, reasonTooFew, 0, 1)
		if h := p.e.forwarding.holds[holdKey{"s", vip.IPv4}]; h == nil || len(h.vips) != 2 {
			t.Fatalf("not both VIPs are held: %+v", h)
		}
		return p, before
	}
	t.Run("revision", func(t *testing.T) {
		p, before := join(t)
		p.reportAt("lb", before)
		p.later(time.Millisecond)
		p.wantRole("s", "a", vip.IPv4, plan.Serving)
		p.reports()
		p.wantRole("s", "a", vip.IPv4, plan.Down)
	})
	t.Run("time to withdraw", func(t *testing.T) {
		p, _ := join(t)
		p.later(testWithdrawTime - 1)
		p.wantRole("s", "a", vip.IPv4, plan.Serving)
		p.later(1)
		p.wantRole("s", "a", vip.IPv4, plan.Down)
	})
}

func TestHoldsAreBounded(t *testing.T) {
	t.Run("no withdrawal", func(t *testing.T) {
		p := twoTargets(t)
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		ends := p.now.Add(testWithdrawTime)
		if !p.out.Next.Equal(ends) {
			t.Errorf("the loop wakes up in %v", p.out.Next.Sub(p.now))
		}
		p.reports(vipA, vip6)
		p.later(ends.Sub(p.now) - 1)
		p.wantRole("s", "b", vip.IPv4, plan.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, plan.Down)
	})
	t.Run("stall of this process", func(t *testing.T) {
		p := twoTargets(t)
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		p.reports(vipA, vip6)
		const stall = testWithdrawTime + time.Second
		for range 2 {
			p.now = p.now.Add(stall)
			p.check(healthcheck.Evaluation{Stalled: stall})
			p.wantRole("s", "b", vip.IPv4, plan.Serving)
		}
		p.later(testWithdrawTime - 1)
		p.wantRole("s", "b", vip.IPv4, plan.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, plan.Down)
	})
	t.Run("frontend gone", func(t *testing.T) {
		p := twoTargets(t)
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		p.later(100 * time.Millisecond)
		p.report.Connected, p.report.At = false, p.now
		p.later(FrontendGone - 1)
		p.wantRole("s", "b", vip.IPv4, plan.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, plan.Down)
	})
	t.Run("stall without a frontend", func(t *testing.T) {
		p := twoTargets(t)
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		p.report.Connected, p.report.At = false, p.now
		p.now = p.now.Add(FrontendGone)
		p.check(healthcheck.Evaluation{Stalled: FrontendGone})
		p.later(FrontendGone - 1)
		p.wantRole("s", "b", vip.IPv4, plan.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, plan.Down)
	})
	t.Run("no frontend", func(t *testing.T) {
		p := twoTargets(t)
		p.report = readiness.Report{}
		p.health("s", "a", healthcheck.NotReady)
		p.confirm()
		p.health("s", "b", healthcheck.NotReady)
		p.later(FrontendGone - 1)
		p.wantRole("s", "b", vip.IPv4, plan.Serving)
		p.later(1)
		p.wantRole("s", "b", vip.IPv4, plan.Down)
	})
}

func TestReturnOfTargetEndsHold(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "b", healthcheck.NotReady)
	p.confirm()
	p.health("s", "a", healthcheck.NotReady)
	p.health("s", "b", healthcheck.Ready)
	// b is not in the kernel yet, so that a still serves.
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv4, plan.Serving)
	p.want(vipA, vip.NotReady, reasonDataPlane, 0, 2)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Down)
	if len(p.e.forwarding.holds) != 0 {
		t.Errorf("still held back: %v", p.e.forwarding.holds)
	}
}

// A VIP that moves to a serving stream leaves the hold of its former stream, which ends no later.
func TestVIPLeavesHold(t *testing.T) {
	vipC := vip.Require("20.0.0.3/32")
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA, vipB), streamOf("t", vipC)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2", "fd00::2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.reports(vipA, vipB, vipC)
	p.health("s", "a", healthcheck.NotReady)
	ends := p.now.Add(testWithdrawTime)
	p.later(time.Second)
	p.configure(trenchOf(streamOf("s", vipA), streamOf("t", vipC, vipB)))
	if h := p.e.forwarding.holds[holdKey{"s", vip.IPv4}]; h == nil || !slices.Equal(h.vips, []vip.VIP{vipA}) {
		t.Fatalf("not only %s is held: %+v", vipA, h)
	}
	p.later(ends.Sub(p.now) - 1)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.later(1)
	p.wantRole("s", "a", vip.IPv4, plan.Down)
}

// A target that fails and returns immediately ends its hold. At its next failure the frontend gets
// the full time to withdraw again.
func TestFlapOfLastTargetEndsHold(t *testing.T) {
	p := twoTargets(t)
	p.health("s", "b", healthcheck.NotReady)
	p.confirm()
	p.health("s", "a", healthcheck.NotReady)
	p.health("s", "a", healthcheck.Ready)
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	if len(p.e.forwarding.holds) != 0 || len(p.out.Held) != 0 {
		t.Errorf("still held back: %v, %v", p.e.forwarding.holds, p.out.Held)
	}
	p.reports(vipA, vip6)
	p.later(testWithdrawTime + time.Second)
	p.health("s", "a", healthcheck.NotReady)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	if len(p.out.Released) != 0 {
		t.Errorf("a hold that just began has ended: %+v", p.out.Released)
	}
}

// A hold that ends while another stream is still held is forgotten: the next hold of the stream has
// a new decision and a new deadline.
func TestHoldsOfStreamsAreIndependent(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("u", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "u": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("u", "b", healthcheck.Ready)
	p.confirm()
	p.reports(vipA, vipB)
	p.health("s", "a", healthcheck.NotReady)
	p.health("u", "b", healthcheck.NotReady)
	first := p.table.Position().Revision
	p.health("s", "a", healthcheck.Ready)
	if len(p.out.Held) != 1 {
		t.Fatalf("held back: %v", p.out.Held)
	}
	p.later(testWithdrawTime - 2)
	p.health("s", "a", healthcheck.NotReady)
	p.reportAt("lb", first) // from before s was not ready again
	p.later(1)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.reportAt("lb", p.table.Position().Revision, vipA)
	p.later(testWithdrawTime - 2)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.later(1)
	p.wantRole("s", "a", vip.IPv4, plan.Down)
}

func TestRemovedStreamServesUntilWithdrawal(t *testing.T) {
	p := twoTargets(t)
	p.members["t"] = []targetset.Member{member("c", "172.16.0.3")}
	p.configure(trenchOf(streamOf("t", vipB)))
	if p.e.roster.find(vipA, new(int)) != nil {
		t.Error("VIP not removed")
	}
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	if got := p.last().Streams["s"].VIPs; !slices.Equal(got, []vip.VIP{vipA, vip6}) {
		t.Errorf("VIPs %v", got)
	}
	if _, there := p.role("t", "c", vip.IPv4); !there {
		t.Error("another stream has to wait")
	}
	p.confirm()
	p.reports() // VIPs that a complete report omits are not advertised
	if p.last().Streams["s"] != nil {
		t.Error("the stream is still there")
	}
}

func TestRemovedVIPForwardedUntilWithdrawal(t *testing.T) {
	p := twoTargets(t)
	p.configure(trenchOf(streamOf("s", vip6)))
	if got := p.last().Streams["s"].VIPs; !slices.Equal(got, []vip.VIP{vip6, vipA}) {
		t.Errorf("VIPs %v", got)
	}
	p.reports(vipA, vip6)
	p.want(vip6, vip.Ready, reasonReady, 2, 2)
	p.reports(vip6)
	if got := p.last().Streams["s"].VIPs; !slices.Equal(got, []vip.VIP{vip6}) {
		t.Errorf("VIPs %v", got)
	}
}

// A planned change: neither the kernel nor the frontend sees a moment without.
func TestVIPMovesToServingStream(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.reports(vipA, vipB)
	revision, sent := p.table.Position().Revision, len(p.sent)
	c := trenchOf(streamOf("s", vipB), streamOf("t", vipA))
	p.configure(c)
	if len(p.sent) != sent+1 {
		t.Fatalf("configured %d times", len(p.sent)-sent)
	}
	for name, want := range map[string]vip.VIP{"s": vipB, "t": vipA} {
		if got := p.last().Streams[name].VIPs; !slices.Equal(got, []vip.VIP{want}) {
			t.Errorf("stream %s has %v", name, got)
		}
	}
	// However long the kernel takes.
	p.later(time.Millisecond)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	p.want(vipB, vip.Ready, reasonReady, 1, 1)
	if p.table.Position().Revision != revision {
		t.Error("the frontend was sent something meanwhile")
	}
}

// A VIP that the kernel cannot move is not ready: it leads to the targets of another stream.
func TestVIPThatCannotMove(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.configure(trenchOf(streamOf("s", vip6), streamOf("t", vipA, vipB)))
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	moving := p.e.kernel.state
	for want, change := range map[string]func(*plan.State){
		"operation not permitted": func(s *plan.State) { s.Err = errors.New("operation not permitted") },
		"VIP 20.0.0.1/32: is an address of eth0": func(s *plan.State) {
			s.Problems = []plan.Problem{{Object: "VIP 20.0.0.1/32", Detail: "is an address of eth0", VIPs: []vip.VIP{vipA}}}
		},
	} {
		state := moving
		change(&state)
		p.confirmState(state)
		if got := p.want(vipA, vip.NotReady, reasonDataPlane, 1, 1); got.Detail != want {
			t.Errorf("detail %q, want %q", got.Detail, want)
		}
		p.want(vipB, vip.Ready, reasonReady, 1, 1)
	}
	p.confirmState(moving)
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
}

// The last target moves to another address: until its VIPs are withdrawn, the kernel has the old one.
func TestMovedTargetServesUntilWithdrawal(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA)), targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.reports(vipA)
	before := p.last().Streams["s"].Targets
	p.members["s"] = []targetset.Member{member("a", "172.16.0.9")}
	p.retarget("s")
	if got := p.last().Streams["s"].Targets; len(got) != 1 || !slices.Equal(got[0].IPs, before[0].IPs) {
		t.Errorf("targets %+v before the withdrawal", got)
	}
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.reports()
	if got := p.last().Streams["s"].Targets; len(got) != 1 || !slices.Equal(got[0].IPs, p.members["s"][0].IPs) {
		t.Errorf("targets %+v after the withdrawal", got)
	}
	p.wantRole("s", "a", vip.IPv4, plan.Draining) // no new flows before a check passes
	p.confirm()
	p.health("s", "a", healthcheck.Ready)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
}

// A stream keeps no target for VIPs that another stream serves.
func TestSharedVIPIsHeldByItsOwner(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("t", vipA)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.reports(vipA)
	p.health("t", "b", healthcheck.NotReady)
	p.wantRole("t", "b", vip.IPv4, plan.Down)
	if len(p.out.Held) != 0 {
		t.Errorf("held back: %q", p.out.Held)
	}
	p.health("s", "a", healthcheck.NotReady)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
}

// Nothing waits for the withdrawal of a VIP that the kernel never had: it never was ready.
func TestVIPNotInKernelIsNotHeld(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA, vipB)), targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	state := applied(plan.State{}, p.last())
	delete(state.VIPs, vipB)
	p.confirmState(state)
	p.reports(vipA)
	p.health("s", "a", healthcheck.NotReady)
	if want := []string{"stream s (ipv4): until the frontend withdraws 1 VIP"}; !slices.Equal(p.out.Held, want) {
		t.Errorf("held back: %q, want %q", p.out.Held, want)
	}
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.reports(vipB) // whatever it contains for the other VIP
	p.wantRole("s", "a", vip.IPv4, plan.Down)
}

func TestVIPMovesToStreamWithoutTargets(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA, vip6), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.reports(vipA)
	p.configure(trenchOf(streamOf("s", vip6), streamOf("t", vipA, vipB)))
	p.want(vipA, vip.NotReady, reasonReconfigured, 0, 1)
	if has := p.streamsOf(vipA); !slices.Equal(has, []string{"s"}) {
		t.Errorf("streams %v have the VIP", has)
	}
	p.reports()
	if has := p.streamsOf(vipA); !slices.Equal(has, []string{"t"}) {
		t.Errorf("streams %v have the VIP", has)
	}
	p.confirm()
	p.health("t", "b", healthcheck.Ready)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
}

func TestUnreachableTarget(t *testing.T) {
	p := twoTargets(t)
	state := applied(p.e.kernel.state, p.last())
	state.Unreachable = map[netip.Addr]string{netip.MustParseAddr("172.16.0.1"): "neighbor 172.16.0.1 does not answer"}
	p.confirmState(state)
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.want(vip6, vip.Ready, reasonReady, 2, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Down)
	p.wantRole("s", "a", vip.IPv6, plan.Serving)
	p.confirm()
	state = applied(p.e.kernel.state, p.last())
	state.Unreachable = map[netip.Addr]string{
		netip.MustParseAddr("172.16.0.1"): "neighbor 172.16.0.1 does not answer",
		netip.MustParseAddr("172.16.0.2"): "link eth1 is down",
	}
	p.confirmState(state)
	got := p.want(vipA, vip.NotReady, reasonTooFew, 0, 2)
	if !strings.Contains(got.Detail, "a (172.16.0.1): neighbor 172.16.0.1 does not answer") {
		t.Errorf("detail %q", got.Detail)
	}
	p.wantRole("s", "b", vip.IPv4, plan.Serving) // until it is withdrawn
	state.Unreachable = nil
	p.confirmState(state)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 2, 2)
}

func TestOwnerOfSharedVIP(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("one", vipA), streamOf("two", vipA)), map[string][]targetset.Member{
		"one": {member("a", "172.16.0.1")}, "two": {member("b", "172.16.0.2"), member("c", "172.16.0.3")},
	})
	p.health("two", "b", healthcheck.Ready)
	p.health("two", "c", healthcheck.Ready)
	p.confirm()
	got := p.want(vipA, vip.NotReady, reasonDataPlane, 0, 1)
	want := "of its streams only one, whose name sorts first, is forwarded to; stream one: 0 of 1 targets ready"
	if !strings.HasPrefix(got.Detail, want) {
		t.Errorf("detail %q", got.Detail)
	}
	p.health("one", "a", healthcheck.Ready)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
}

func TestRestartLeavesTheKernelAsItIs(t *testing.T) {
	before := plan.State{
		Streams: map[string]*plan.StreamState{"s": {Serving: [2]map[string]struct{}{{"a": {}, "gone": {}}, {}}}},
		VIPs:    map[vip.VIP]string{vipA: "s"},
	}
	p := newPlaneRig(t, before, targets("s", member("a", "172.16.0.1"), member("b", "172.16.0.2")))
	p.e.Configure(p.now, trenchOf(streamOf("s", vipA)), p.of)
	p.health("s", "a", healthcheck.Ready)
	// a stayed, so that nothing has to be withdrawn; b is not known yet.
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv4, plan.Unknown)
}

func TestVanishedTargetLeavesAfterWithdrawal(t *testing.T) {
	for name, now := range map[string]struct {
		config *trench.Config
		ends   func(*planeRig)
	}{
		"another target":       {trenchOf(streamOf("s", vipA)), func(p *planeRig) { p.reports() }},
		"no such stream":       {trenchOf(streamOf("t", vipA)), func(p *planeRig) { p.reports() }},
		"no such VIP":          {trenchOf(streamOf("s", vipB)), func(p *planeRig) { p.reports() }},
		"no frontend connects": {trenchOf(streamOf("s", vipA)), func(p *planeRig) { p.later(testWithdrawTime) }},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlaneRig(t, plan.State{
				Streams: map[string]*plan.StreamState{"s": {Serving: [2]map[string]struct{}{{"a": {}}, {}}}},
				VIPs:    map[vip.VIP]string{vipA: "s"},
			}, targets("s", member("b", "172.16.0.2")))
			p.configure(now.config)
			p.health("s", "b", healthcheck.NotReady)
			p.later(FrontendGone)
			if p.last() != nil {
				t.Fatal("the kernel was changed before the frontend withdrew")
			}
			now.ends(p)
			if p.last() == nil {
				t.Fatal("still held back")
			}
		})
	}
}

func TestDrainingTargetsServeWithoutOthers(t *testing.T) {
	p := twoTargets(t)
	p.drain("s", "a", time.Minute)
	p.wantRole("s", "a", vip.IPv4, plan.Draining)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.drain("s", "b", 2*time.Minute)
	got := p.want(vipA, vip.Draining, reasonDraining, 0, 2)
	if !got.DrainEnd.Equal(p.now.Add(2 * time.Minute)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(p.now))
	}
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv4, plan.Serving)
	p.confirm()
	p.health("s", "b", healthcheck.NotReady)
	p.wantRole("s", "b", vip.IPv4, plan.Down)
	p.confirm()
	p.want(vipA, vip.Draining, reasonDraining, 0, 2)
	p.drain("s", "a", -1)
	p.want(vipA, vip.NotReady, reasonTooFew, 0, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Serving) // until it is withdrawn
	p.reports()
	p.wantRole("s", "a", vip.IPv4, plan.Down)
}

// The old target drains at the moment in which the new one is ready: nothing is
// about to end, and no peer learns that.
func TestDrainWaitsForSuccessor(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA)), targets("s",
		member("a", "172.16.0.1"), member("b", "172.16.0.2")))
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.health("s", "b", healthcheck.Ready) // not confirmed
	p.drain("s", "a", time.Minute)
	p.want(vipA, vip.Ready, reasonReady, 0, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	// Nothing is to be withdrawn, and however long the kernel takes, the old target serves.
	if len(p.out.Held) != 0 {
		t.Errorf("held back: %v", p.out.Held)
	}
	p.later(2 * testWithdrawTime)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a", vip.IPv4, plan.Draining)

	// If the kernel cannot take the successor, the drain is one.
	p.members["s"] = append(p.members["s"], member("c", "172.16.0.3"))
	p.retarget("s")
	p.health("s", "c", healthcheck.Ready)
	state := applied(p.e.kernel.state, p.last())
	delete(state.Streams["s"].Serving[vip.IPv4], "c")
	state.Streams["s"].Problem[vip.IPv4] = "no number is free"
	p.confirmState(state)
	p.drain("s", "b", time.Minute)
	p.want(vipA, vip.Draining, reasonDraining, 0, 3)
}

// A draining target continues to serve while too few targets replace it.
func TestDrainWaitsForEnoughSuccessors(t *testing.T) {
	s := streamOf("s", vipA)
	s.MinReady = 2
	p := startPlaneRig(t, trenchOf(s), targets("s",
		member("a", "172.16.0.1"), member("b", "172.16.0.2"), member("c", "172.16.0.3")))
	p.health("s", "a", healthcheck.Ready)
	p.health("s", "b", healthcheck.Ready)
	p.confirm()
	p.health("s", "c", healthcheck.Ready) // not confirmed
	p.drain("s", "a", time.Minute)
	p.want(vipA, vip.Ready, reasonReady, 1, 3)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 2, 3)
	p.wantRole("s", "a", vip.IPv4, plan.Draining)
}

func TestRoles(t *testing.T) {
	for _, c := range []struct {
		name     string
		health   healthcheck.State
		draining healthcheck.State
		want     plan.Role
	}{
		{"not checked", healthcheck.Starting, healthcheck.Ready, plan.Unknown},
		{"ready", healthcheck.Ready, healthcheck.Ready, plan.Serving},
		{"dead", healthcheck.NotReady, healthcheck.Ready, plan.Down},
		{"overdue", healthcheck.Overdue, healthcheck.Ready, plan.Unknown},
		{"draining", healthcheck.Ready, healthcheck.Draining, plan.Draining},
		{"draining, not checked", healthcheck.Starting, healthcheck.Draining, plan.Unknown},
		{"draining, dead", healthcheck.NotReady, healthcheck.Draining, plan.Down},
		{"draining, overdue", healthcheck.Overdue, healthcheck.Draining, plan.Draining},
		{"drained by an operator", healthcheck.Ready, healthcheck.Drained, plan.Down},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startPlaneRig(t, trenchOf(streamOf("s", vipA)), targets("s",
				member("a", "172.16.0.1"), member("other", "172.16.0.2")))
			p.health("s", "other", healthcheck.Ready)
			p.confirm()
			p.members["s"][0].Draining, p.members["s"][0].DrainEnd = c.draining, p.now.Add(time.Minute)
			p.retarget("s")
			p.health("s", "a", c.health)
			p.wantRole("s", "a", vip.IPv4, c.want)
		})
	}
}

func TestUnchangedStreamKeepsPointer(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA), streamOf("t", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1")}, "t": {member("b", "172.16.0.2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	before := p.last()
	p.health("t", "b", healthcheck.Ready)
	now := p.last()
	if now.Revision != before.Revision+1 {
		t.Errorf("revision %d after %d", now.Revision, before.Revision)
	}
	if now.Streams["s"] != before.Streams["s"] || now.Streams["t"] == before.Streams["t"] {
		t.Error("not only stream t was replaced")
	}
	sent := len(p.sent)
	p.configure(trenchOf(streamOf("s", vipA), streamOf("t", vipB))) // the same, read again
	p.confirm()
	p.later(time.Second)
	if len(p.sent) != sent {
		t.Error("the data plane got what it has")
	}
}

// A target that has another address drains at the old one, under a name of its own, and serves
// there until a check passes at the new one.
func TestOneTargetOfAName(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA)), targets("s",
		member("a", "172.16.0.1"), member("b", "172.16.0.9")))
	p.health("s", "a", healthcheck.Ready)
	p.health("s", "b", healthcheck.Ready)
	p.confirm()
	leaves := member("a", "172.16.0.1")
	leaves.Draining, leaves.DrainEnd = healthcheck.Draining, p.now.Add(time.Minute)
	p.members["s"] = []targetset.Member{member("a", "172.16.0.2"), member("b", "172.16.0.9"), leaves}
	p.retarget("s")
	var got []string
	for _, x := range p.last().Streams["s"].Targets {
		got = append(got, fmt.Sprintf("%s %s %d", x.Name, x.IPs, x.Roles[vip.IPv4]))
	}
	if want := []string{"a [172.16.0.2] 2", "b [172.16.0.9] 3", "a@172.16.0.1 [172.16.0.1] 2"}; !slices.Equal(got, want) {
		t.Errorf("targets %q, want %q", got, want)
	}
	p.want(vipA, vip.Ready, reasonReady, 1, 3)
	p.members["s"] = slices.Delete(p.members["s"], 1, 2)
	p.retarget("s")
	p.wantRole("s", "a@172.16.0.1", vip.IPv4, plan.Serving)
	p.want(vipA, vip.Draining, reasonDraining, 0, 2)
	p.confirm()
	p.want(vipA, vip.Draining, reasonDraining, 0, 2)
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.wantRole("s", "a@172.16.0.1", vip.IPv4, plan.Draining)
}

// A renamed target counts as forwarded to until the kernel has its new name, and no longer.
func TestRenamedTargetStaysReady(t *testing.T) {
	p := twoTargets(t)
	p.members["s"] = []targetset.Member{member("c", "172.16.0.1", "fd00::1"), member("a", "172.16.0.2", "fd00::2")}
	p.retarget("s")
	for _, name := range []string{"c", "a"} {
		p.health("s", name, healthcheck.Ready)
	}
	p.want(vipA, vip.Ready, reasonReady, 2, 2)
	if len(p.out.Held) > 0 {
		t.Errorf("held back: %q", p.out.Held)
	}
	state := applied(p.e.kernel.state, p.last())
	state.Streams["s"].Serving[vip.IPv4] = map[string]struct{}{"a": {}}
	p.confirmState(state)
	p.want(vipA, vip.Ready, reasonReady, 1, 2)
	p.want(vip6, vip.Ready, reasonReady, 2, 2)
}

// The kernel lags: its state of an older revision is about to be removed, and does not
// count although it is desired again.
func TestRevokedDataPlaneStateDoesNotCount(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA)), targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	first := applied(plan.State{}, p.last())
	p.drain("s", "a", -1)
	p.drain("s", "a", time.Minute)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.confirmState(first)
	p.want(vipA, vip.NotReady, reasonDataPlane, 0, 1)
	p.confirmState(applied(first, p.sent[len(p.sent)-2]))
	p.want(vipA, vip.NotReady, reasonDataPlane, 0, 1)
	p.confirm()
	p.want(vipA, vip.Draining, reasonDraining, 0, 1)
	if len(p.e.kernel.revoked) != 0 {
		t.Errorf("still revoked: %v", p.e.kernel.revoked)
	}
}

// BenchmarkChangeAmongManyVIPs measures the cost of the data plane in the loop when one
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
	p := startPlaneRig(b, c, members)
	for name, list := range members {
		for _, m := range list {
			p.health(name, m.Name, healthcheck.Ready)
		}
	}
	state := applied(p.e.kernel.state, p.last())
	p.confirmState(state)
	b.Run("a target", func(b *testing.B) {
		for i := range b.N {
			p.health("s0", "t0", []healthcheck.State{healthcheck.NotReady, healthcheck.Ready}[i%2])
		}
	})
	b.Run("a state of the kernel", func(b *testing.B) {
		for range b.N {
			state.VIPs = maps.Clone(state.VIPs)
			p.confirmState(state)
		}
	})
	b.Run("nothing", func(b *testing.B) {
		for range b.N {
			p.later(time.Millisecond)
		}
	})
}

// While first verdicts are awaited no target of the family enters the table: the first ones would get
// the flows of all. Targets that already serve in the kernel stay.
func TestTargetsOfNewStreamServeTogether(t *testing.T) {
	newRig := func(state plan.State) *planeRig {
		p := newPlaneRig(t, state, map[string][]targetset.Member{
			"s": {member("a", "172.16.0.1", "fd00::1"), member("b", "fd00::2")},
		})
		p.e.options.Settle = time.Second
		p.configure(trenchOf(streamOf("s", vipA, vip6)))
		p.health("s", "a", healthcheck.Ready)
		p.wantRole("s", "a", vip.IPv4, plan.Serving)
		return p
	}
	p := newRig(plan.State{})
	p.wantRole("s", "a", vip.IPv6, plan.Unknown)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	p.want(vip6, vip.NotReady, reasonNotChecked, 0, 2)
	p.health("s", "b", healthcheck.Ready)
	p.wantRole("s", "a", vip.IPv6, plan.Serving)
	p.wantRole("s", "b", vip.IPv6, plan.Serving)
	p.confirm()
	p.want(vip6, vip.Ready, reasonReady, 2, 2)

	p = newRig(plan.State{}) // a target without a verdict
	p.later(time.Second)
	p.wantRole("s", "a", vip.IPv6, plan.Serving)
	p.wantRole("s", "b", vip.IPv6, plan.Unknown)

	p = newRig(applied(plan.State{}, p.last())) // a restart
	p.wantRole("s", "a", vip.IPv6, plan.Serving)
}
