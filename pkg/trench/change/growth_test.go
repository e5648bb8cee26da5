package change_test

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/growth"
)

func TestGrowth(t *testing.T) {
	for _, dimension := range growth.Dimensions {
		// The next file has nothing of the former one; or its streams have no target, or end all.
		prepare := func(n int) (full, empty, idle, ending *trench.Config) {
			full = dimension.Of(n).Trench()
			empty, idle, ending = growth.Sizes{}.Trench(), dimension.Of(n).Trench(), dimension.Of(n).Trench()
			for i := range full.Streams {
				idle.Streams[i].Targets = nil
				for nth := range ending.Streams[i].Targets {
					ending.Streams[i].Targets[nth].Name += "-next"
					ending.Streams[i].Targets[nth].IPs = growth.Target(nth + 5000).IPs
					ending.Streams[i].Targets[nth].Terminating = true
				}
			}
			return full, empty, idle, ending
		}
		growth.Check(t, "hold "+dimension.Name, dimension.Few, dimension.Many, func(t *testing.T, n int) func() {
			full, empty, idle, ending := prepare(n)
			return func() {
				for _, next := range []*trench.Config{empty, idle, ending} {
					effective, held := change.Hold(full, next, trench.Held{}, "", all)
					if held.ID == "" && len(full.Streams) > 1 || held.Whole {
						t.Fatalf("held %+v", held)
					}
					change.Hold(effective, next, held, "", all)
				}
			}
		})
		growth.Check(t, "compare "+dimension.Name, dimension.Few, dimension.Many, func(t *testing.T, n int) func() {
			full, empty, idle, ending := prepare(n)
			return func() {
				inForce := (&change.InForce{}).Next(trench.Loaded{Config: full}, nil, true)
				for _, next := range []*trench.Config{empty, idle, ending} {
					inForce.Next(trench.Loaded{Config: next}, vip.NewSet(full.Attractor.VIPs...), true).Leaving()
					edit := change.Between(full, next)
					_ = edit.Text(0)
				}
			}
		})
	}
}
