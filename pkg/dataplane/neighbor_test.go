package dataplane

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Neighbor state is watched. The first failure may be seen by a look that has another reason, such
// as the plane's own changes that are reported back; the second one is only seen if it is heard of,
// since nothing else happens, and the next look at everything is a minute away.
func TestRepeatedNeighborFailures(t *testing.T) {
	for _, x := range []struct {
		family vip.Family
		addr   string
	}{{vip.IPv4, "10.1.0.12"}, {vip.IPv6, "fd01::c"}} {
		t.Run(x.family.String(), func(t *testing.T) {
			s := newSite(t)
			p := s.start()
			p.configure(siteStream("a", bothVIPs, siteTarget(1, Serving, Serving), siteTarget(2, Serving, Serving)))
			for range 3 {
				s.sh("ip neigh replace " + x.addr + " dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace " + x.addr +
					" dev eth1 nud failed")
				p.wait("t2 out of the table",
					func(s State) bool { return serves(s, "a", x.family, "t1") && len(s.Unreachable) == 1 })
				s.sh("ip neigh replace " + x.addr + " dev eth1 lladdr 02:00:00:00:00:12 nud permanent")
				p.wait("t2 in the table",
					func(s State) bool { return serves(s, "a", x.family, "t1", "t2") && len(s.Unreachable) == 0 })
			}
		})
	}
}
