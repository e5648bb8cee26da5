package dataplane

import (
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A VIP is READY only after table, rules and routes were read back. All of them exist here, but a
// foreign rule sends packets elsewhere.
func TestMisroutedTargetDoesNotServe(t *testing.T) {
	x := newSite(t)
	x.sh("ip route add default via 10.1.0.77 table 77; ip rule add prio 50 lookup 77")
	p := x.start()
	p.Configure(desiredOf(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving))))
	s := p.wait("a problem of the target", func(s plan.State) bool {
		return slices.ContainsFunc(s.Problems, func(p Problem) bool { return p.Object == "target a/t1" && p.Detail != "" })
	})
	if !serves(s, "a", vip.IPv4) {
		t.Error("the target is said to serve: " + describeState(s))
	}
	p.wait("the other family", func(s plan.State) bool { return serves(s, "a", vip.IPv6, "t1") })
	x.sh("ip rule del prio 50")
	p.wait("the target to serve", func(s plan.State) bool {
		return serves(s, "a", vip.IPv4, "t1") && len(s.Problems) == 0
	})
}
