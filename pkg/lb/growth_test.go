package lb

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/growth"
)

// The targets of all streams fail and return, and the streams end and return.
func TestGrowth(t *testing.T) {
	for name, sizes := range map[string]func(n int) (streams, vips int){
		"VIPs": func(n int) (int, int) { return 1, n }, "streams": func(n int) (int, int) { return n, 10 },
	} {
		few, many := 500, 25_000
		if name == "streams" {
			few, many = 50, 500
		}
		growth.Check(t, name, few, many, func(t *testing.T, n int) func() {
			streams, vips := sizes(n)
			l := newBenchLoop(t, streams, vips, true)
			empty := *l.trench
			empty.Streams, empty.Attractor.VIPs = empty.Streams[:1], empty.Attractor.VIPs[:1]
			loads := uint64(1)
			return func() {
				for range 2 {
					l.flip(len(l.keys))
					l.evaluate(input{})
				}
				for _, config := range []*trench.Config{&empty, l.trench} {
					loads++
					l.evaluate(l.load(trench.Loaded{Config: config, Generation: loads}))
				}
			}
		})
	}
}
