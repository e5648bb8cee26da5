package dataplane

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// If a different stream serves all VIPs of a stream, its chain has no Maglev map and no table size
// to read back. It is still written only once.
func TestStreamWhoseVIPsAnotherServes(t *testing.T) {
	x := newSite(t)
	a := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving))
	b := siteStream("b", bothVIPs, siteTarget(2, plan.Serving, plan.Serving))
	b.Match = siteMatch
	for _, start := range []string{"first", "second"} {
		p := x.start()
		p.Configure(desiredOf(a, b))
		s := p.wait("both streams", func(s plan.State) bool {
			return serves(s, "a", vip.IPv4, "t1") && s.Streams["b"] != nil && s.Revision != 0
		})
		for _, problem := range s.Problems {
			if !strings.HasPrefix(problem.Object, "VIP ") {
				t.Errorf("%s start: %+v", start, problem)
			}
		}
		if len(s.Drift) > 0 {
			t.Errorf("%s start: %+v", start, s.Drift)
		}
		p.stop()
	}
	p := x.start()
	p.Configure(desiredOf(a, b))
	p.wait("both streams", func(s plan.State) bool { return s.Streams["b"] != nil && s.Revision != 0 })
	x.sh("nft flush chain inet vipgate-lb stream/b")
	p.wait("the repair", func(s plan.State) bool { return s.Repairs > 0 && len(s.Drift) == 0 })
	p.configure(b)
	p.wait("the other stream", func(s plan.State) bool {
		return serves(s, "b", vip.IPv4, "t2") && serves(s, "b", vip.IPv6, "t2") && s.VIPs[vip.Require(bothVIPs[0])] == "b"
	})
}
