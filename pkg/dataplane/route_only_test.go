package dataplane

import (
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Targets have fwmarks before the first desired state. It keeps the fwmarks of desired targets and
// removes the rest. Until then the objects of an earlier process do not change.
func TestRoutesBeforeTheFirstDesiredState(t *testing.T) {
	x := newSite(t)
	p := x.start()
	before := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving))
	p.configure(before)
	p.stop()
	installed := x.snapshot()

	routes := func(p *running, targets ...plan.Target) map[netip.Addr]uint32 {
		s := siteStream("b", []string{"20.0.0.2/32"}, targets...)
		s.RouteAll = true
		p.Configure(&plan.Desired{RoutesOnly: true, Streams: map[string]*plan.Stream{"b": s}})
		last := targets[len(targets)-1]
		return p.wait("routes to the targets", func(s plan.State) bool {
			return s.Streams["b"] != nil && s.Streams["b"].FWMarks[last.IPs[0]] != 0
		}).Streams["b"].FWMarks
	}
	p = x.start()
	two, three := siteTarget(2, plan.Unknown, plan.Unknown), siteTarget(3, plan.Unknown)
	marks := routes(p, two)
	s := p.State().Load()
	if !serves(s, "a", vip.IPv4, "t1") || !serves(s, "a", vip.IPv6, "t1") || s.Revision != 0 || len(s.Problems) > 0 ||
		s.Streams["a"].FWMarks[before.Targets[0].IPs[1]] != 5000 || marks[two.IPs[0]] != 5001 || marks[two.IPs[1]] != 5001 {
		t.Fatalf("%v, %s", marks, describeState(s))
	}
	x.has(t, "default via 10.1.0.12 dev eth1 table 5001", "via fd01::c dev eth1 table 5001", "lookup 5001")
	x.lacks(t, "stream/b", "target/5001")
	if drift, err := p.Reconcile(t.Context()); err == nil {
		t.Errorf("repaired %v without a desired state", drift)
	}
	p.stop() // as after a crash: only the routes identify the target

	p = x.start()
	if marks := routes(p, two, three); marks[two.IPs[0]] != 5001 || marks[three.IPs[0]] != 5002 {
		t.Fatalf("the routes of an earlier process have other fwmarks: %v", marks)
	}
	two.Roles = [2]plan.Role{plan.Serving, plan.Serving}
	b := siteStream("b", []string{"20.0.0.2/32"}, two, three)
	b.RouteAll = true
	s = p.configure(before, b)
	if !serves(s, "b", vip.IPv4, "t2") || s.Streams["b"].FWMarks[three.IPs[0]] != 5002 || x.number("b", "t2") != "5001" {
		t.Fatal(describeState(s))
	}
	x.has(t, "chain target/5002", "default via 10.1.0.13 dev eth1 table 5002")
	x.lacks(t, "goto target/5002")
	all := *before
	all.RouteAll = true
	p.configure(&all)
	if s := p.State().Load(); s.Streams["a"].FWMarks[all.Targets[0].IPs[0]] != 5000 {
		t.Errorf("nothing changed but that fwmarks are asked for: %v", s.Streams["a"].FWMarks)
	}
	p.configure(before)
	if after := x.snapshot(); after != installed {
		t.Errorf("before\n%s\nafter\n%s", installed, after)
	}
}
