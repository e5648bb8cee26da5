package e2e

import (
	"testing"

	"github.com/vipgate/vipgate/test/load"
	"github.com/vipgate/vipgate/test/traffic"
)

// Flows whose target the trench scaled away from their slot stay with it when gateways move them to
// another pod, also to a new one that finds the earlier targets in the trench file.
func TestFlowsMoveAfterScaling(t *testing.T) {
	t.Parallel()
	s := traffic.Moves()
	ctx, trench := openTrench(t, traffic.Options{Targets: s.Targets})
	row, err := trench.Run(ctx, s)
	t.Logf("\n%s", load.Table(row))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Check(row); err != nil {
		t.Errorf("%v\n%s", err, trench.Logs())
	}
}
