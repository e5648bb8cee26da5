package plan

import (
	"maps"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// A VIP that one stream removes and a second one assigns is assigned, in either order.
func TestMergedChangeAssignsVIPs(t *testing.T) {
	moved, removed, added := vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32"), vip.Require("2000::1/128")
	from := Change{
		VIPs: map[vip.VIP]string{moved: "", removed: ""}, RemoveStreams: []string{"a"}, RemoveTargets: []uint32{1},
	}
	to := Change{
		VIPs: map[vip.VIP]string{moved: "b", added: "b"}, Targets: make([]KernelTarget, 2), Streams: make([]StreamWrite, 1),
	}
	want := map[vip.VIP]string{moved: "b", removed: "", added: "b"}
	for _, order := range [][]Change{{from, to}, {to, from}, {from, {}, to}} {
		var c Change
		if !c.Empty() {
			t.Error("a change without anything is not empty")
		}
		for _, d := range order {
			c.Add(d)
		}
		if !maps.Equal(c.VIPs, want) || len(c.Targets) != 2 || len(c.Streams) != 1 || len(c.RemoveStreams) != 1 ||
			len(c.RemoveTargets) != 1 || c.Empty() {
			t.Errorf("got %+v", c)
		}
	}
	for _, c := range []Change{
		{Base: true},
		{Targets: to.Targets},
		{Streams: to.Streams},
		{VIPs: from.VIPs},
		{RemoveStreams: []string{"a"}},
		{RemoveTargets: []uint32{1}},
	} {
		if c.Empty() {
			t.Errorf("%+v is empty", c)
		}
	}
}
