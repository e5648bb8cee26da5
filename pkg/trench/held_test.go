package trench

import (
	"reflect"
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

// lb and a frontend hold different removals, and each takes the identifier of the other.
func TestConfirm(t *testing.T) {
	vips := []vip.VIP{vip.Require("20.0.0.1/32")}
	frontend := Held{ID: "v00000001", VIPs: vips}
	both := Held{ID: "c00000003,v00000001", VIPs: vips, Checks: []string{"a"}}
	check := Held{ID: "c00000003", Checks: []string{"a"}}
	targets := Held{ID: "t00000002", Streams: []string{"b"}}
	all := Held{ID: "c00000003,v00000001,t00000002", VIPs: vips, Streams: []string{"b"}, Checks: []string{"a"}}
	for _, tt := range []struct {
		held       Held
		identifier string
		confirmed  Held
		problem    string
	}{
		{frontend, "", frontend, ""},
		{frontend, frontend.ID, frontend, ""},
		{frontend, both.ID, frontend, ""},
		{frontend, check.ID, Held{}, `"c00000003" does not wait for a confirmation; v00000001 does`},
		{both, both.ID, both, ""},
		{both, frontend.ID, frontend, ""},
		{both, check.ID, check, ""},
		{both, targets.ID, Held{}, "c00000003,v00000001 does: the removal of 1 of 0 VIPs"},
		{all, "", all, ""},
		{all, all.ID, all, ""},
		{all, targets.ID, targets, ""},
		{Held{}, "", Held{}, "no removal waits"},
		{Held{}, check.ID, Held{}, "no removal waits"},
	} {
		confirmed, err := tt.held.confirm(tt.identifier)
		if !reflect.DeepEqual(confirmed, tt.confirmed) ||
			(err == nil) != (tt.problem == "") || err != nil && !strings.Contains(err.Error(), tt.problem) {
			t.Errorf("%s of %+v: got %+v (%v), want %+v, %q", tt.identifier, tt.held, confirmed, err, tt.confirmed, tt.problem)
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
