package dataplane

import (
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Without a health check of the family, and without packets of a VIP after the target's
// removal from the table, nothing else triggers resolution of the address.
func TestFailedNeighborIsRetried(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	for _, a := range []string{"10.1.0.11", "fd01::b"} {
		x.sh("ip neigh replace " + a + " dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace " + a +
			" dev eth1 nud failed")
	}
	s := p.wait("no target to serve", func(s plan.State) bool {
		return serves(s, "a", vip.IPv4) && serves(s, "a", vip.IPv6)
	})
	if len(s.Unreachable) != 2 || s.Unreachable[netip.MustParseAddr("fd01::b")] == "" {
		t.Error(describeState(s))
	}
	x.must(x.peer.IP("address", "add", "10.1.0.11/24", "dev", "peer"))
	x.must(x.peer.IP("address", "add", "fd01::b/64", "dev", "peer", "nodad"))
	p.wait("the target to serve again", func(s plan.State) bool {
		return serves(s, "a", vip.IPv4, "t1") && serves(s, "a", vip.IPv6, "t1") && len(s.Unreachable) == 0
	})
}
