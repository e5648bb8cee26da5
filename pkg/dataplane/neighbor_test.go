package dataplane

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// The plane watches neighbor state. A read for an unrelated reason, such as the plane's own
// changes, may detect the first failure. Only a notification detects the second one: no other
// event occurs, and the next full read is a minute away.
func TestRepeatedNeighborFailures(t *testing.T) {
	for _, x := range []struct {
		family vip.Family
		addr   string
	}{{vip.IPv4, "10.1.0.12"}, {vip.IPv6, "fd01::c"}} {
		t.Run(x.family.String(), func(t *testing.T) {
			s := newSite(t)
			p := s.start()
			p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
				siteTarget(2, plan.Serving, plan.Serving)))
			for range 3 {
				s.sh("ip neigh replace " + x.addr + " dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace " + x.addr +
					" dev eth1 nud failed")
				p.wait("t2 out of the table",
					func(s plan.State) bool { return serves(s, "a", x.family, "t1") && len(s.Unreachable) == 1 })
				s.sh("ip neigh replace " + x.addr + " dev eth1 lladdr 02:00:00:00:00:12 nud permanent")
				p.wait("t2 in the table",
					func(s plan.State) bool { return serves(s, "a", x.family, "t1", "t2") && len(s.Unreachable) == 0 })
			}
		})
	}
}
