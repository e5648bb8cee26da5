package trench_test

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/growth"
)

// Also with a problem for each VIP: the attractor has none of a stream's.
func TestGrowthOfValidation(t *testing.T) {
	for _, dimension := range growth.Dimensions {
		growth.Check(t, dimension.Name, dimension.Few, dimension.Many, func(t *testing.T, n int) func() {
			config := dimension.Of(n).Trench()
			if problems := trench.Validate(config); len(problems) > 0 {
				t.Fatalf("%+v", problems[0])
			}
			unknown := *config
			unknown.Attractor.VIPs = config.Attractor.VIPs[:1]
			return func() { trench.Validate(config); trench.Validate(&unknown) }
		})
	}
}
