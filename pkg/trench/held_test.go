package trench

import (
	"strings"
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

// lb holds more than a frontend, and its status names the commands that confirm it.
func TestConfirmable(t *testing.T) {
	vips := []vip.VIP{vip.Require("20.0.0.1/32")}
	frontend := Held{ID: "v00000001", VIPs: vips}
	both := Held{ID: "c00000003,v00000001", VIPs: vips, Checks: []string{"a"}}
	check := Held{ID: "c00000003", Checks: []string{"a"}}
	for _, tt := range []struct {
		held       Held
		identifier string
		want       string
	}{
		{frontend, "", ""},
		{frontend, frontend.ID, ""},
		{frontend, both.ID, ""},
		{frontend, check.ID, `"c00000003" does not identify all held removals; v00000001 does`},
		{both, both.ID, ""},
		{both, frontend.ID, `"v00000001" does not identify all held removals; c00000003,v00000001 does`},
		{both, check.ID, "does not identify"},
		{Held{}, check.ID, "no removal waits"},
	} {
		err := tt.held.confirmable(tt.identifier)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s of %+v: got %v, want %q", tt.identifier, tt.held, err, tt.want)
		}
	}
	for commands, held := range map[string]Held{
		"with `lb confirm c00000003`,":                                              check,
		"with `frontend confirm v00000001` and `lb confirm v00000001`,":             frontend,
		"with `frontend confirm " + both.ID + "` and `lb confirm " + both.ID + "`,": both,
	} {
		if got := held.Problem(); !strings.Contains(got, commands) {
			t.Errorf("got %q, want %q", got, commands)
		}
	}
}
