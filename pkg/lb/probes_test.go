package lb

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vipgate/vipgate/pkg/vip"
)

func TestSuspectEvents(t *testing.T) {
	a, b := vip.Require("20.0.0.1/32"), vip.Require("20.0.0.2/32")
	all := map[vip.VIP]string{}
	for n := range maxSuspectEvents + 1 {
		all[vip.Require(fmt.Sprintf("20.0.1.%d/32", n))] = "two probes"
	}
	for name, c := range map[string]struct {
		before, after map[vip.VIP]string
		want          []string
	}{
		"unchanged": {map[vip.VIP]string{a: "two"}, map[vip.VIP]string{a: "three"}, nil},
		"one begins": {map[vip.VIP]string{a: "two"}, map[vip.VIP]string{a: "two", b: "two"}, []string{
			"20.0.0.2/32 dead, by probes: two",
		}},
		"both end": {map[vip.VIP]string{b: "two", a: "two"}, nil, []string{
			"20.0.0.1/32 no longer dead, by probes: two", "20.0.0.2/32 no longer dead, by probes: two",
		}},
		"many": {nil, all, []string{"51 VIPs dead, by probes: 20.0.1.0/32: two probes (and 50 more)"}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, event := range suspectEvents(c.before, c.after) {
				got = append(got, event.GetObject()+" "+event.GetTo()+": "+event.GetDetail())
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
	if got := probeProblem(map[vip.VIP]string{b: "two", a: "two"}, "no socket"); got != "20.0.0.1/32: two (and 1 more)" {
		t.Errorf("problem %q", got)
	}
	if got := probeProblem(nil, "no socket"); got != "no socket" {
		t.Errorf("problem %q", got)
	}
}
