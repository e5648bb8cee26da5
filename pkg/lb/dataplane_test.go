package lb

import (
	"errors"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// A change that the kernel refuses, and bad input, is a condition that names its object. What
// another process changed is not.
func TestTheConditionOfTheDataPlaneSaysWhy(t *testing.T) {
	full := errors.New("records cannot be written: no space left on device")
	vip, chain := dataplane.Problem{Object: "VIP 20.0.0.1/32", Detail: "two want it"}, dataplane.Problem{
		Object: "chain x",
		Detail: "belongs to another process",
	}
	for name, tt := range map[string]struct {
		state plan.State
		want  string
	}{
		"all is well": {plan.State{}, ""},
		"drift":       {plan.State{Drift: []plan.Drift{{Object: "rule"}}}, ""},
		"disk full":   {plan.State{Err: full}, full.Error()},
		"a problem":   {plan.State{Problems: []dataplane.Problem{vip}}, "VIP 20.0.0.1/32: two want it"},
		"all of it": {
			plan.State{Err: full, Problems: []dataplane.Problem{vip, chain}},
			full.Error() + "; VIP 20.0.0.1/32: two want it (and 1 more)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := dataPlaneProblem(tt.state); got != tt.want {
				t.Errorf("it says %q, want %q", got, tt.want)
			}
		})
	}
}
