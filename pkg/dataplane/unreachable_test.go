package dataplane

import (
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// The unreachable addresses follow changes of the targets while the network is unchanged.
func TestUnreachableFollowsTargets(t *testing.T) {
	w := newModelFixture()
	near, far := testTarget("x1", plan.Serving), testTarget("x2", plan.Serving)
	far.IPs[0] = netip.MustParseAddr("192.0.2.1") // on no connected network
	drained := far
	drained.Roles[0] = plan.Draining
	for _, step := range []struct {
		targets     []plan.Target
		unreachable int
	}{
		{[]plan.Target{near}, 0},
		{[]plan.Target{near, far}, 1},
		{[]plan.Target{near, drained}, 1},
		{[]plan.Target{near}, 0},
		{nil, 0},
	} {
		network := w.e.network
		w.settle(desiredOf(testStream("a", []string{"20.0.0.1/32"}, step.targets...)), false)
		s := w.state()
		if _, ok := s.Unreachable[far.IPs[0]]; len(s.Unreachable) != step.unreachable || ok != (step.unreachable > 0) {
			t.Errorf("with %d targets %v cannot be reached", len(step.targets), s.Unreachable)
		}
		if w.e.network != network {
			t.Error("the network was read again")
		}
	}
}
