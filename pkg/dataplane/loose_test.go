package dataplane

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Flow rules and flow maps are repaired like all objects. Flows in the maps are not drift.
func TestFlowRulesAreRepaired(t *testing.T) {
	x := newSite(t)
	p := x.start(func(o *Options) { o.Conntrack = ConntrackLoose })
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	whole := func(s plan.State) bool {
		return serves(s, "a", vip.IPv4, "t1") && serves(s, "a", vip.IPv6, "t1") && len(s.VIPs) == 2 &&
			len(s.Drift)+len(s.Problems) == 0
	}
	p.wait("both families", whole)
	before := sortedLines(x.snapshot())
	for _, rule := range []string{"new flows", "TCP flows that close"} {
		list := x.sh("nft -a list chain inet vipgate-lb stream/a | grep -F 'vipgate: " + rule + "'")
		_, handle, _ := strings.Cut(strings.SplitN(list, "\n", 2)[0], "# handle ")
		x.sh("nft delete rule inet vipgate-lb stream/a handle " + handle)
		x.eventually("rule "+rule+" to be restored", func() bool { return sortedLines(x.snapshot()) == before })
	}
	repairs := p.State().Load().Repairs
	x.sh(`nft 'add element inet vipgate-lb flows4 { 10.9.0.1 . 20.0.0.1 . tcp . 1 . 80 timeout 1h : 5000 }'`)
	x.sh("nft flush ruleset")
	p.wait("the repair of everything", func(s plan.State) bool { return whole(s) && s.Repairs > repairs })
	x.eventually("all to be restored", func() bool { return sortedLines(x.snapshot()) == before })
}
