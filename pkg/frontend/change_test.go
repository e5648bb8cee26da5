package frontend

import (
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/turns"
)

func TestChangesOfGateways(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	parameters := []string{"hold time", "name"}
	state := func(change turns.Change) bird.State {
		return bird.State{Alive: true, Gateways: []bird.GatewayState{{Name: "a", Change: change, State: "Active"}}}
	}
	was := bird.State{Alive: true}
	for _, step := range []struct {
		is          bird.State
		text, event string
		inProgress  bool
		problem     string
	}{
		{is: state(turns.Change{})},
		{
			state(turns.Change{Phase: turns.Pending, Parameters: parameters, Until: now.Add(time.Minute)}),
			"change pending: hold time, name", "gateway a waits for its turn to change: hold time, name", true, "",
		},
		{
			state(turns.Change{Phase: turns.Draining, Parameters: parameters, Until: now.Add(1500 * time.Millisecond)}),
			"draining before a change: hold time, name, 2 s left", "gateway a is de-preferred before a change: hold time, name",
			true, "",
		},
		{
			state(turns.Change{Phase: turns.Restarting, Parameters: parameters}), "changing: hold time, name",
			"gateway a restarts with a change: hold time, name", true, "",
		},
		{
			state(turns.Change{Failed: parameters}), "", "gateway a did not come back after a change: hold time, name", false,
			"a did not come back after a change: hold time, name; Active",
		},
		{
			state(turns.Change{Phase: turns.Leaving, Until: now.Add(time.Second)}), "leaving, 1 s left",
			"gateway a left the configuration: de-preferred, then removed", true, "",
		},
		{is: bird.State{Alive: true}, event: "gateway a was removed after its drain"},
	} {
		var events []string
		for _, event := range changeEvents(was, step.is) {
			events = append(events, event.GetDetail())
		}
		var want []string
		if step.event != "" {
			want = []string{step.event}
		}
		if !slices.Equal(events, want) {
			t.Errorf("events %q, want %q", events, want)
		}
		text := ""
		if len(step.is.Gateways) > 0 {
			text = changeText(step.is.Gateways[0].Change, now)
		}
		if problem := changeProblem(step.is); text != step.text || problem != step.problem ||
			isChanging(step.is) != step.inProgress {
			t.Errorf("%q and problem %q, want %q and %q", text, problem, step.text, step.problem)
		}
		was = step.is
	}
}
