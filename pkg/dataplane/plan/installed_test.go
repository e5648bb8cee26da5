package plan

import (
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Every pass copies the maps of targets of the streams that it plans.
func TestMapsOfTargetsStoreThemInline(t *testing.T) {
	x := InstalledTarget{FWMark: 5000, Label: Label{Stream: "s", Name: "t"}}
	x.IPs[vip.IPv4] = netip.MustParseAddr("10.0.0.1")
	m := map[string]InstalledTarget{}
	if n := testing.AllocsPerRun(100, func() {
		clear(m)
		m[x.Name] = x
	}); n != 0 {
		t.Errorf("%v allocations to store a target in a map", n)
	}
}
