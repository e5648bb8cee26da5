package gate

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
)

func TestGrowth(t *testing.T) {
	for name, work := range map[string]func(g *Gate, now time.Time, vips []vip.VIP, states []VIPState){
		"decision": func(g *Gate, now time.Time, _ []vip.VIP, states []VIPState) {
			for _, state := range []vip.State{vip.NotReady, vip.Draining, vip.Ready} {
				for i := range states {
					states[i].State = state
				}
				g.UpdateLB(now, update(now, false, states))
				g.Evaluate(now)
			}
			g.Deadline(now)
		},
		"edit": func(g *Gate, now time.Time, vips []vip.VIP, _ []VIPState) {
			for _, list := range [][]vip.VIP{vips[:1], vips} {
				g.Configure(list)
				g.Route(vip.NewSet(list...))
				g.Evaluate(now)
			}
		},
		"drain": func(g *Gate, now time.Time, vips []vip.VIP, _ []VIPState) {
			g.Drain(now, vips...)
			g.Evaluate(now)
			g.Deadline(now)
			g.Drained()
			g.Undrain(vips...)
			g.Evaluate(now)
		},
	} {
		growth.Check(t, name, 500, 25_000, func(t *testing.T, n int) func() {
			g, states, now := benchGate(t, n)
			var vips []vip.VIP
			for _, state := range states {
				vips = append(vips, state.VIP)
			}
			return func() { work(g, now, vips, states) }
		})
	}
}
