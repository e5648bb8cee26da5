package policy

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
	"github.com/vipgate/vipgate/test/harness"
)

// An edit that replaces the policy of each VIP.
func TestGrowth(t *testing.T) {
	growth.Check(t, "policies", 250, 25_000, func(t *testing.T, n int) func() {
		config := growth.Sizes{VIPs: n, Policies: n}.Trench()
		decision := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
		var decided []gate.Change
		for _, v := range config.Attractor.VIPs {
			decided = append(decided, gate.Change{VIP: v, To: decision})
		}
		return func() {
			all, err := New(config.Attractor.Policies, Carried)
			harness.Must(t, err)
			next, err := New(config.Attractor.Policies[:1], Carried)
			harness.Must(t, err)
			of := func(vip.VIP) gate.Decision { return decision }
			var batch []announce.Change
			batch = all.Changes(batch, decided)
			batch = all.Replaced(batch[:0], next, config.Attractor.VIPs, of)
			all.Edit(next, batch, of)
			Describe(config.Attractor.Policies)
			lookup := all.Lookup()
			for _, change := range decided {
				lookup.Cause(change)
			}
		}
	})
}
