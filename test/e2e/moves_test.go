package e2e

import (
	"cmp"
	"fmt"
	"os"
	"strconv"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/load"
	"github.com/vipgate/vipgate/test/traffic"
)

// Flows whose target the trench scaled away from their slot stay with it when gateways move them to
// another pod, also to a new one that finds the earlier targets in the trench file, or asks all.
func TestFlowsMoveAfterScaling(t *testing.T) {
	t.Parallel()
	for _, history := range []bool{true, false} {
		t.Run(fmt.Sprintf("history %v", history), func(t *testing.T) {
			t.Parallel()
			playMoves(t, traffic.Moves(), traffic.Options{History: history})
		})
	}
}

// flowsVariable is the number of flows of [TestFlowsSurviveSequence], in every mode of tracking:
// 1 000 in make proof. Without it the modes that differ most are played.
const flowsVariable = "VIPGATE_TEST_FLOWS"

// No flow of a living target breaks while targets are scaled and replaced, pods are replaced and
// lost, and gateways change their choice of pods.
func TestFlowsSurviveSequence(t *testing.T) {
	t.Parallel()
	flows, err := strconv.Atoi(cmp.Or(os.Getenv(flowsVariable), "60"))
	harness.Must(t, err)
	modes := map[string][]string{
		"on": {"--conntrack=on"}, "fast path": {"--conntrack=off", "--dataplane=fastpath-required"},
	}
	few := os.Getenv(flowsVariable) == ""
	if !few {
		modes["loose"], modes["off"] = []string{"--conntrack=loose"}, []string{"--conntrack=off"}
	}
	for name, arguments := range modes {
		t.Run(name, func(t *testing.T) {
			if few { // else one after another, for the load of the machine
				t.Parallel()
			}
			playMoves(t, traffic.Sequence(flows), traffic.Options{BFD: true, LB: arguments})
		})
	}
}

func playMoves(t *testing.T, s traffic.Scenario, options traffic.Options) {
	t.Helper()
	options.Targets, options.Downloads = s.Targets, true
	ctx, trench := openTrench(t, options)
	row, err := trench.Run(ctx, s)
	t.Logf("\n%s", load.Table(row))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(row); err != nil {
		t.Errorf("%v\n%s", err, trench.Logs())
	}
}
