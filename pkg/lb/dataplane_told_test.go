package lb

import (
	"errors"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane"
)

// Issue 5: "Disk full: the data plane stays as it is, readiness says why", and bad input is "a clear condition with
// the name". What somebody changed by hand is no such thing.
func TestTheConditionOfTheDataPlaneSaysWhy(t *testing.T) {
	full := errors.New("records cannot be written: no space left on device")
	vip, chain := dataplane.Problem{Object: "VIP 20.0.0.1/32", Detail: "two want it"}, dataplane.Problem{Object: "chain x", Detail: "not ours"}
	for name, tt := range map[string]struct {
		state dataplane.State
		want  string
	}{
		"all is well": {dataplane.State{}, ""},
		"drift":       {dataplane.State{Drift: []dataplane.Drift{{Object: "rule"}}}, ""},
		"disk full":   {dataplane.State{Err: full}, full.Error()},
		"a problem":   {dataplane.State{Problems: []dataplane.Problem{vip}}, "VIP 20.0.0.1/32: two want it"},
		"all of it":   {dataplane.State{Err: full, Problems: []dataplane.Problem{vip, chain}}, full.Error() + "; VIP 20.0.0.1/32: two want it (and 1 more)"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := dataPlaneProblem(tt.state); got != tt.want {
				t.Errorf("it says %q, want %q", got, tt.want)
			}
		})
	}
}
