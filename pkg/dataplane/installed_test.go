package dataplane

import (
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// A process that was killed during the resize of a large table left the stream's rules on
// the shadow map.
func TestRestartAfterKilledResize(t *testing.T) {
	x := newSite(t)
	stream := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Serving, plan.Serving))
	stream.Size = 10007
	p := x.start()
	p.configure(stream)
	p.stop()
	f := openConn(t, x.ns, fwstate.Config{})
	table := slices.Repeat([]uint32{5000, 5001}, 20011/2+1)[:20011]
	want := plan.KernelStream{Name: "a", Size: 20011, Seed: stream.Seed, Tables: [2][]uint32{table, table}}
	must(t, f.SwitchToShadow(&want))
	x.has(t, "spare4/a")
	stream.Size = 20011
	p = x.start()
	p.configure(stream)
	p.wait("the stream to serve",
		func(s plan.State) bool { return serves(s, "a", 0, "t1", "t2") && len(s.VIPs) == 2 && len(s.Drift) == 0 })
	x.lacks(t, "spare")
	x.has(t, "mod 20011")
}
