package trench

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// The frontend reports the removals that only the load balancer holds.
func TestHeldTargets(t *testing.T) {
	vips := []vip.VIP{vip.Require("20.0.0.1/32")}
	for _, tt := range []struct {
		held Held
		want string
	}{
		{Held{}, ""},
		{Held{ID: "v00000001", VIPs: vips, Base: vips, Gateways: []string{"g"}}, ""},
		{
			Held{ID: "v00000001,t00000002", VIPs: vips, Streams: []string{"a"}},
			"t00000002: the removal of all targets of streams (a) waits for a confirmation",
		},
		{
			Held{ID: "c00000003,v00000001,t00000002", VIPs: vips, Streams: []string{"a"}, Checks: []string{"b", "c"}},
			"c00000003,t00000002: the removal of all targets of streams (a), the old checks of streams (b, c), whose " +
				"targets fail the new ones waits for a confirmation",
		},
	} {
		if got := tt.held.Targets(); got != tt.want {
			t.Errorf("%+v: got %q, want %q", tt.held, got, tt.want)
		}
	}
}
