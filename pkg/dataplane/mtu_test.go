package dataplane

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/test/lab"
)

// A link toward targets with a smaller MTU than the link toward the gateways is a problem while
// the MTUs differ. Links to neither, and links toward targets with the larger MTU, are not
// reported.
func TestSmallMTUTowardTargets(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for name, addr := range map[string]string{"ext": "169.254.100.2/24", "other": "192.0.2.2/24"} {
		must(t, lab.Veth(s.ns, name, s.peer, name))
		must(t, s.ns.Addr(name, addr))
	}
	s.sh("ip link set other mtu 1280")
	p := s.start(func(o *Options) {
		o.Gateways = func() []netip.Addr { return []netip.Addr{netip.MustParseAddr("169.254.100.254")} }
	})
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	expect := func(change, detail string) {
		s.sh(change)
		p.wait(change, func(s plan.State) bool {
			if detail == "" || len(s.Problems) != 1 {
				return detail == "" && len(s.Problems) == 0
			}
			x := s.Problems[0]
			return x.Object == "link eth1" && strings.Contains(x.Detail, detail) && strings.Contains(x.Remedy, "dev eth1 mtu 1")
		})
	}
	expect("ip link set eth1 mtu 1400", "its MTU is 1400, that of ext toward the gateways 1500")
	expect("ip link set eth1 mtu 1500", "")
	expect("ip link set eth1 mtu 1300", "its MTU is 1300")
	expect("ip link set ext mtu 1300", "")
	expect("ip link set eth1 mtu 1299", "its MTU is 1299, that of ext toward the gateways 1300")
	expect("ip link set ext down", "")
}

// The largest link toward a gateway counts, and each smaller one toward a target is named.
func TestSmallMTUOfSeveralLinks(t *testing.T) {
	w := newModelFixture()
	gateways := []netip.Addr{
		netip.MustParseAddr("169.254.2.1"), netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("203.0.113.1"),
	}
	w.e.options.Gateways = func() []netip.Addr { return gateways }
	w.settle(streamA(testTarget("x1", plan.Serving)), false)
	link := func(name string, index, mtu int, prefix string) plan.Link {
		return plan.Link{
			Name: name, Index: index, Up: true, MTU: mtu, Prefixes: []netip.Prefix{netip.MustParsePrefix(prefix)},
		}
	}
	w.e.network = &plan.Network{Links: []plan.Link{
		link("ext1", 2, 1400, "169.254.1.0/24"), link("ext2", 3, 9000, "169.254.2.0/24"),
		link("int0", 4, 1500, "10.0.0.0/8"), link("eth0", 5, 1280, "192.0.2.0/24"),
	}}
	got := w.e.network.MTUProblems(gateways, w.e.targetAddresses)
	if len(got) != 1 || got[0].Object != "link int0" || !strings.Contains(got[0].Detail, "ext2") {
		t.Errorf("got %v", got)
	}
	gateways = gateways[1:2]
	if got = w.e.network.MTUProblems(gateways, w.e.targetAddresses); got != nil {
		t.Errorf("with the smaller external link only: %v", got)
	}
}
