package bird

import (
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
)

const (
	// leaveMargin keeps the session of a gateway that leaves after the drain time, so that VIPs that
	// leave at the same time are withdrawn by an UPDATE.
	leaveMargin = 500 * time.Millisecond
	// sessionLimit bounds each wait for a session. A gateway usually connects within 2 s.
	sessionLimit = 30 * time.Second
)

func (g GatewayState) changing() bool {
	return g.Change.Phase != turns.Steady && g.Change.Phase != turns.Pending
}

// hung reports whether BIRD runs and does not answer.
func (state State) hung() bool { return state.PID != 0 && !state.Alive }

// takeTurns sets the sessions that BIRD is to have. loaded is the previous resolution's sequence.
func (resolver *resolver) takeTurns(w desired, state State, now *resolution, sequence uint64) {
	input := turns.Input{
		Now: time.Now(), Gateways: w.attractor.Gateways, Sessions: now.desired, Hung: state.hung(),
		Loaded: sequence > 0 && state.Loaded == sequence, State: map[string]turns.State{},
		Drained:   func(name string) bool { return w.exports[name] == ExportNone },
		Immediate: w.immediate, Ordered: resolver.options.Ordered != nil && resolver.options.Ordered(),
	}
	for _, gateway := range state.Gateways {
		if state.Alive {
			// A gateway has a state for each family.
			is, known := input.State[gateway.Name]
			complete := gateway.Protocol == trench.Static || gateway.Exported >= gateway.Announced || !gateway.Up
			is.Complete = (!known || is.Complete) && complete
			is.Up, is.BFD = is.Up || gateway.Up, gateway.BFD == bfdUp
			is.Lacks[gateway.Family] = !gateway.Up
			input.State[gateway.Name] = is
		}
	}
	entries, wake := resolver.plan.Step(input)
	resolver.wake, now.changes = wake, map[string]turns.Change{}
	present := map[string]trench.Gateway{}
	var leaving []trench.Gateway
	for _, entry := range entries {
		session := Session{
			Gateway: entry.Gateway, Path: entry.Path, Password: entry.Password, Export: w.exports[entry.Name],
		}
		if entry.Depreferred() {
			session.Export = max(session.Export, ExportDepreferred)
		}
		now.input.Sessions = append(now.input.Sessions, session)
		now.changes[entry.Name] = entry.Change
		if present[entry.Next] = entry.Gateway; entry.Next == "" {
			leaving = append(leaving, entry.Gateway)
		}
	}
	for _, gateway := range w.attractor.Gateways {
		if current, ok := present[gateway.Name]; ok {
			gateway = current
		}
		now.gateways = append(now.gateways, gateway)
	}
	now.gateways = append(now.gateways, leaving...)
}
