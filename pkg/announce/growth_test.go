package announce

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
	"github.com/vipgate/vipgate/test/harness"
)

// As many routes as VIPs, if each has attributes of its own, and one.
func TestGrowth(t *testing.T) {
	e, err := newEncoder(Options{LocalAS: 64512, PeerAS: 8103}.withDefaults())
	harness.Must(t, err)
	for name, own := range map[string]bool{"one route": false, "a route each": true} {
		prepare := func(n int) (batches [2]Batch) {
			for i := range n {
				route := Route{Advertisement: Announced}
				if own {
					communities := []uint32{64512<<16 | uint32(i)}
					route.Attributes = Metrics{}.Attributes(communities, nil)
				}
				v := numbered(i)
				batches[0].Changes = append(batches[0].Changes, Change{v, route})
				batches[1].Changes = append(batches[1].Changes, Change{v, Route{}})
			}
			return batches
		}
		families := [...]bool{vip.IPv4: true, vip.IPv6: true}
		growth.Check(t, name+", edit", 1000, 25_000, func(t *testing.T, n int) func() {
			batches, all := prepare(n), newTable()
			return func() {
				for _, batch := range batches {
					var queued changes
					all.post(batch, true)
					all.takeChanges(&queued)
					e.appendUpdates(nil, &queued, families)
				}
			}
		})
		growth.Check(t, name+", session", 1000, 25_000, func(t *testing.T, n int) func() {
			all := newTable()
			all.post(prepare(n)[0], false)
			return func() {
				var queued changes
				all.takeAll(&queued)
				e.appendUpdates(nil, &queued, families)
			}
		})
	}
}
