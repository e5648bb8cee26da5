package midstream

import (
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
)

// modelFlow is what the model knows about a flow: its target, and whether this pod has decided it.
type modelFlow struct {
	conn   net.Conn
	target int
	known  bool
}

// TestRandomSequences compares each answer with a model: a flow keeps its target if this pod knows
// the flow, or the target is the current one or is asked; an unknown one is copied.
func TestRandomSequences(t *testing.T) {
	for _, asking := range []asking{second, threeWay, everyone} {
		t.Run(string(asking), func(t *testing.T) {
			randomSequence(t, newFixture(t, asking), asking, rand.New(rand.NewPCG(1, 0)))
		})
	}
}

func randomSequence(t *testing.T, x *fixture, asking asking, random *rand.Rand) {
	asked := map[int]bool{2: true, 3: asking != second, 1: asking == everyone}
	current := 1
	var flows []*modelFlow
	// answer reports whether a flow lives after a request.
	answer := func(step int, flow *modelFlow) bool {
		copies := x.counters().Asked
		got, err := ask(flow.conn)
		keeps := flow.known || flow.target == current || asked[flow.target]
		if keeps != (err == nil) || keeps && got != fmt.Sprint(flow.target) {
			t.Fatalf("step %d: %q, %v of flow %+v, current target %d", step, got, err, flow, current)
		}
		// A late ACK of the client may have ended a flow before.
		if keeps && !flow.known && x.counters().Asked == copies {
			t.Fatalf("step %d: no copy of flow %+v", step, flow)
		}
		flow.known = true
		return keeps
	}
	for step := range 120 {
		switch action := random.IntN(4); {
		case action == 0 || len(flows) == 0:
			// A late ACK of an unknown flow must not see the target of the new flow as the current one.
			flows = slices.DeleteFunc(flows, func(flow *modelFlow) bool { return !flow.known && !answer(step, flow) })
			// The flow begins in another pod, which has another table, or in this one.
			flow := &modelFlow{target: 1 + random.IntN(3), known: true}
			x.forward(uint32(4999 + flow.target))
			flow.conn = x.dial(vip.Families[random.IntN(len(vip.Families))])
			if got, err := ask(flow.conn); got != fmt.Sprint(flow.target) || err != nil {
				t.Fatalf("step %d: a new flow: %q, %v", step, got, err)
			}
			x.forward(uint32(4999 + current))
			flows = append(flows, flow)
		case action == 1:
			// In the other fixtures a copy would go to the current target, too.
			if asking == everyone {
				current = 1 + random.IntN(3)
			}
			x.forward(uint32(4999 + current))
			if err := x.kernel.FlushConntrack([]uint32{5000, 5001, 5002}); err != nil {
				t.Fatal(err)
			}
			for _, flow := range flows {
				flow.known = false
			}
		default:
			if i := random.IntN(len(flows)); !answer(step, flows[i]) {
				flows = slices.Delete(flows, i, i+1)
			}
		}
	}
}
