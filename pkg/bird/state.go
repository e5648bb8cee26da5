package bird

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// State is the observed state of BIRD and its sessions.
type State struct {
	At             time.Time // start of the last poll that BIRD answered
	Alive          bool      // BIRD answers
	Version        string
	PID            int       // 0 while none runs
	Since          time.Time // of the process
	Restarts       int       // after the first start
	Configures     uint64    // configurations that a running BIRD loaded
	ConfigFailures uint64    // configurations that were refused, or not rendered, written or sent
	Err            error     // why BIRD does not answer; wraps ErrHung when BIRD runs
	ConfigErr      error     // why BIRD keeps its previous configuration instead of the desired one
	Gateways       []GatewayState
}

// ErrHung reports that BIRD runs but does not answer.
var ErrHung = errors.New("BIRD_HUNG")

// GatewayState is one configured gateway.
type GatewayState struct {
	Name      string
	Address   netip.Addr
	Family    vip.Family
	Up        bool
	State     string    // the session's state as BIRD names it
	Since     time.Time // when Up last changed
	Imported  int
	Exported  int
	LastError string // of the session
	BFD       string // the BFD session's state, empty without one
	Problem   string // why BIRD has no session with the gateway
}

// Expect sets how many VIPs of each family were announced to BIRD. The supervisor polls at short
// intervals until the sessions export as many.
func (s *Supervisor) Expect(announced4, announced6 int) {
	want := [len(vip.Families)]int{announced4, announced6}
	if s.expect.Load() != want {
		s.expect.Set(want)
	}
}

// Confirm waits until every gateway session that is up exports the expected number of VIPs in a
// poll that began after the call and in fastExtra more: BIRD before 2.14 counts a route as exported
// before it writes the UPDATE, and further commands wake it to do so. Without a BIRD process
// nothing is exported, and Confirm returns at once.
func (s *Supervisor) Confirm(ctx context.Context) error {
	after := time.Now()
	s.confirming.Add(1)
	defer s.confirming.Add(-1)
	s.trigger()
	for seen := 0; ; {
		want, expected := s.expect.Get()
		state, looked := s.state.Get()
		switch {
		case state.PID == 0 && !state.Alive:
			return nil
		case !state.Alive, !state.At.After(after):
		case !exports(state.Gateways, want):
			seen, after = 0, state.At
		default:
			seen, after = seen+1, state.At
		}
		if seen > fastExtra {
			return nil
		}
		select {
		case <-looked:
		case <-expected:
		case <-ctx.Done():
			return fmt.Errorf("gateway sessions do not export the expected routes (%d IPv4, %d IPv6): %w",
				want[vip.IPv4], want[vip.IPv6], ctx.Err())
		}
	}
}

// exports reports whether every session that is up exports the expected number of VIPs.
func exports(gateways []GatewayState, want [len(vip.Families)]int) bool {
	for _, g := range gateways {
		if g.Up && g.Exported != want[g.Family] {
			return false
		}
	}
	return true
}

// states returns the state of each desired gateway; protocols is nil while BIRD does not run.
func (v resolution) states(
	at time.Time, protocols map[string]Protocol, bfd map[netip.Addr]string, before State,
) []GatewayState {
	was := byName(before.Gateways)
	list := make([]GatewayState, 0, len(v.gateways))
	for _, c := range v.gateways {
		g := GatewayState{Name: c.Name, Address: c.Address, Family: c.Family(), Since: at}
		p, ok := protocols[gatewayPrefix+c.Name]
		switch {
		case v.problems[c.Name] != "":
			g.Problem = v.problems[c.Name]
		case protocols == nil:
			g.State = "BIRD is not running"
		case !ok && before.ConfigErr != nil:
			g.Problem = "BIRD has no such session: " + before.ConfigErr.Error()
		case !ok:
			g.Problem = "BIRD has no such session yet"
		default:
			g.Up, g.State, g.LastError = p.Up(), cmp.Or(p.BGPState, p.State), p.LastError
			g.Imported, g.Exported = p.Imported, p.Exported
		}
		if c.BFD != nil && ok {
			g.BFD = bfd[c.Address]
		}
		if old, known := was[c.Name]; known && old.Up == g.Up {
			g.Since = old.Since
		}
		list = append(list, g)
	}
	return list
}

func byName(list []GatewayState) map[string]GatewayState {
	m := make(map[string]GatewayState, len(list))
	for _, g := range list {
		m[g.Name] = g
	}
	return m
}

// logTransitions logs changes of sessions, and reports whether one came up. Each error is logged
// once until the session is up: BIRD clears it at its next attempt.
func (s *Supervisor) logTransitions(before, after []GatewayState) (came bool) {
	was := byName(before)
	for _, g := range after {
		switch {
		case g.Up && !was[g.Name].Up:
			came = true
			delete(s.failures, g.Name)
			s.options.Log.Info("gateway session up", "gateway", g.Name, "address", g.Address)
		case !g.Up && was[g.Name].Up:
			s.failures[g.Name] = g.LastError
			s.options.Log.Warn("gateway session lost", "gateway", g.Name, "address", g.Address,
				"state", g.State, "last_error", g.LastError, "problem", g.Problem)
		case !g.Up && g.LastError != "" && g.LastError != s.failures[g.Name]:
			s.failures[g.Name] = g.LastError
			s.options.Log.Warn("gateway session failed", "gateway", g.Name, "address", g.Address, "error", g.LastError)
		}
	}
	return came
}
