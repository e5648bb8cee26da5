package bird

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
)

// State is the observed state of BIRD and its sessions.
type State struct {
	At             time.Time // start of the last poll that BIRD answered
	Answered       time.Time // an answer of BIRD, to whatever request, since the poll before
	Alive          bool      // BIRD answers
	Name           string    // of a speaker that another program runs; "" for our BIRD
	Version        string
	PID            int       // 0 while BIRD does not run
	Since          time.Time // start of the process
	Restarts       int       // starts after the first one
	Loaded         uint64    // sequence of the resolution that BIRD had loaded at the poll
	Configures     uint64    // configurations that a running BIRD loaded
	ConfigFailures uint64    // configurations that were refused, or not rendered, written or sent
	Restores       uint64    // configurations loaded again because BIRD lacked some of their protocols
	Err            error     // why BIRD does not answer; wraps ErrHung when BIRD runs
	ConfigErr      error     // why BIRD keeps its previous configuration instead of the desired one
	LeaseErr       error     // error of writing the lease of static gateways' BFD sessions
	// Loopback is the state of the session with the announcer in BIRD's words, NoLoopbackSocket if
	// BIRD cannot listen, or LoopbackDisabled.
	Loopback string
	Gateways []GatewayState
}

// States of the session with the announcer.
const (
	NoLoopbackSocket = noSocket
	LoopbackDisabled = "disabled"
)

// loopback returns the state of the session with the announcer.
func loopback(protocol Protocol) string {
	switch {
	case strings.Contains(protocol.Info, noSocket):
		return NoLoopbackSocket
	case protocol.State == "down":
		return LoopbackDisabled
	}
	return cmp.Or(protocol.BGPState, protocol.State)
}

// errHung reports that BIRD runs but does not answer.
var errHung = errors.New("BIRD_HUNG")

// GatewayState is one configured gateway.
type GatewayState struct {
	Name    string
	Address netip.Addr // zero while the address of an unnumbered gateway is unknown
	// Interface of an unnumbered gateway, else "".
	Interface string
	Family    vip.Family
	Protocol  trench.Protocol
	// Up reports whether the BGP session is established and has the family. A static gateway is up if
	// its BFD session is up or it has no BFD.
	Up bool
	// Held reports whether the static gateway's BFD session is held down because its family does not
	// attract traffic.
	Held bool
	// Usable reports whether the gateway is up, or is static and may come up once its family attracts.
	Usable   bool
	State    string    // the session's state as BIRD names it, or a state of static gateways
	Since    time.Time // when Up last changed
	Imported int
	Exported int
	Export   Export // in BIRD's configuration
	Change   turns.Change
	// LastError is the reason why the session was lost or does not come up under the current
	// configuration. The next attempt does not clear it.
	LastError      string
	LastErrorAt    time.Time // when it was observed last; zero while the session is up
	Notification   string    // the last NOTIFICATION with its remedy; empty while the session is up
	NotificationAt time.Time // when it was observed
	BFD            string    // the BFD session's state, empty without one
	Problem        string    // why BIRD has no session with the gateway
	Warning        string    // a limitation of this gateway
	// ImportsBlocked reports whether BIRD ignores routes of the gateway beyond the import limit.
	ImportsBlocked bool
	// NoDelay reports whether the session's TCP connection has TCP_NODELAY.
	NoDelay        bool
	NoDelayProblem string // why TCP_NODELAY is not set although the session is up
	// Announced counts the VIPs of the gateway's family that the announcer sent; 0 with ExportNone.
	Announced int
	// Short reports whether BIRD exported fewer VIPs than Announced for longer than an export takes.
	Short bool
	// Exports holds the VIPs that BIRD exports to the gateway while Short; nil if unknown. Read-only.
	Exports vip.Set
	exports exportList
	// Foreign reports whether the session belongs to a speaker that another program runs.
	Foreign bool

	evidence evidence // static gateways only
	// isLacking reports whether the session is established without the family.
	isLacking bool
}

// sessionKey identifies one family of the session with a gateway.
type sessionKey struct {
	name   string
	family vip.Family
}

func (g *GatewayState) key() sessionKey { return sessionKey{g.Name, g.Family} }

// Peer returns the address, or the interface while the address is unknown.
func (g GatewayState) Peer() string {
	return trench.Gateway{Address: g.Address, Interface: g.Interface}.Peer()
}

// States of static gateways that BIRD has no name for.
const (
	StateHeld     = "Held"
	StateNoBFD    = "No BFD"
	StateDraining = "Draining"
)

// Expect sets the number of VIPs of each family that were announced to BIRD. The supervisor polls
// at short intervals until the sessions export that number.
func (supervisor *Supervisor) Expect(announced4, announced6 int) {
	want := [len(vip.Families)]int{announced4, announced6}
	if supervisor.expect.Load() != want {
		supervisor.expect.Set(want)
	}
}

// Confirm waits until every established gateway session exports the expected number of VIPs and
// every held BFD session is down. Both must hold in a poll that began after the call and in
// fastExtra more polls: BIRD before 2.14 counts a route as exported before it writes the UPDATE,
// and further commands wake it to do so. Without a BIRD process nothing is exported, and Confirm
// returns immediately.
func (supervisor *Supervisor) Confirm(ctx context.Context) error {
	after := time.Now()
	supervisor.confirming.Add(1)
	defer supervisor.confirming.Add(-1)
	supervisor.trigger()
	for seen := 0; ; {
		want, expected := supervisor.expect.Get()
		_, leased := supervisor.lease.State().Get()
		state, looked := supervisor.state.Get()
		switch {
		case state.PID == 0 && !state.Alive:
			return nil
		// Neither a hanging BIRD nor a survey from before the call confirms anything.
		case !state.Alive, !state.At.After(after):
		case !supervisor.lease.Settled():
			seen, after = 0, time.Now()
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
		case <-leased:
		case <-expected:
		case <-ctx.Done():
			return fmt.Errorf("gateway sessions do not export the expected routes (%d IPv4, %d IPv6): %w",
				want[vip.IPv4], want[vip.IPv6], ctx.Err())
		}
	}
}

// exports reports whether every session that is up exports the expected number of VIPs. BIRD
// exports nothing to a static gateway, which withdraws the VIPs when its BFD session goes down.
func exports(gateways []GatewayState, want [len(vip.Families)]int) bool {
	for _, gateway := range gateways {
		switch {
		case !gateway.Up:
		case gateway.Protocol == trench.Static && gateway.Held, gateway.Protocol == trench.BGP &&
			gateway.Exported != gateway.expected(want):
			return false
		}
	}
	return true
}

// expected returns how many of the announced VIPs BIRD exports to the gateway after a convergence.
func (g *GatewayState) expected(announced [len(vip.Families)]int) int {
	if g.Export == ExportNone {
		return 0
	}
	return announced[g.Family]
}

// states returns the state of each family of each desired gateway; protocols is nil without BIRD.
func (resolution resolution) states(
	at time.Time, protocols map[string]Protocol, bfd map[netip.Addr]string, lease bfdlease.State, before State,
) []GatewayState {
	was := byKey(before.Gateways)
	list := make([]GatewayState, 0, len(resolution.gateways))
	for _, gateway := range resolution.gateways {
		for _, family := range gateway.FamilyList() {
			list = append(list, resolution.state(gateway, family, at, protocols, bfd, lease, before, was))
		}
	}
	return list
}

// state returns the state of one family of a gateway.
func (resolution resolution) state(
	gateway trench.Gateway, family vip.Family, at time.Time, protocols map[string]Protocol,
	bfd map[netip.Addr]string, lease bfdlease.State, before State, was map[sessionKey]GatewayState,
) GatewayState {
	g := GatewayState{
		Name: gateway.Name, Address: gateway.Address, Interface: gateway.Interface, Family: family,
		Protocol: gateway.Protocol, Since: at, Change: resolution.changes[gateway.Name],
	}
	old, known := was[g.key()]
	g.evidence = old.evidence.about(gateway, resolution.input.Interface)
	protocol, ok := protocols[gatewayPrefix+gateway.Name]
	switch {
	case resolution.problems[gateway.Name] != "":
		g.Problem = resolution.problems[gateway.Name]
	case protocols == nil:
		g.State = "BIRD is not running"
	case !ok && protocols[egressPrefix+gateway.Name].Name != "":
		// The gateway sends no traffic without a BFD session, and replies still leave.
		g.State, g.Usable, g.Imported = StateDraining, true, protocols[egressPrefix+gateway.Name].Imported()
	// A refused configuration explains why BIRD lacks the session.
	case !ok && before.ConfigErr != nil:
		g.Problem = "BIRD has no such session: " + before.ConfigErr.Error()
	case !ok:
		g.Problem = "BIRD has no such session yet"
	case gateway.Protocol == trench.Static:
		g.static(at, gateway, protocol, bfd[gateway.Address], lease)
		g.Imported = max(protocol.Imported(), protocols[egressPrefix+gateway.Name].Imported())
	default:
		channel := protocol.Channels[family]
		g.Up, g.State, g.LastError = protocol.Up(), cmp.Or(protocol.BGPState, protocol.State), protocol.LastError
		if g.isLacking = g.Up && !channel.Up; g.isLacking {
			g.Up, g.State, g.LastError = false, g.State+" without "+family.String(), resolution.lacking(gateway.Name, family)
		}
		g.Usable, g.Imported, g.Exported = g.Up, channel.Imported, channel.Exported
		if g.Up && protocol.HoldTime > 0 && protocol.HoldTime < gateway.HoldTime {
			g.Warning = fmt.Sprintf("the hold time is %v, which the gateway offers, instead of %v; set %[2]v at the gateway, "+
				"or holdTime: %[1]v", protocol.HoldTime, gateway.HoldTime)
		}
	}
	if vrrp, ok := protocols[vrrpName(family)]; ok {
		g.Imported = vrrp.Imported() // VRRP routes replace the gateways' routes
	}
	if gateway.Protocol == trench.Static && gateway.BFD == nil {
		g.Warning = "it cannot be withdrawn without BFD: write bfd: {} and configure BFD at the gateway"
	}
	if gateway.BFD != nil && ok {
		g.BFD = bfd[gateway.Address]
	}
	if known && old.Up == g.Up {
		g.Since = old.Since
	}
	return g
}

// lacking explains why an established session lacks a family.
func (resolution resolution) lacking(gateway string, family vip.Family) string {
	for _, session := range resolution.input.Sessions {
		if session.Name == gateway && session.lacks(family) {
			return "no global IPv6 address, which the IPv6 VIPs need as their next hop; add one to the interface"
		}
	}
	return fmt.Sprintf("the gateway has not activated %s unicast for the session; activate it there, "+
		"or set families", family)
}

// static sets the state of a static gateway from the state of its protocol and its BFD session.
func (g *GatewayState) static(at time.Time, c trench.Gateway, protocol Protocol, bfd string,
	lease bfdlease.State,
) {
	family := g.Family
	switch {
	case protocol.State != "up":
		g.State = cmp.Or(protocol.State, "down") // an operator disabled it
	case c.BFD == nil:
		g.Up, g.Usable, g.State = true, true, StateNoBFD
	case !lease.Attract[family]:
		g.evidence.held(at, bfd)
		// BIRD's session stays up until the gateway's detection time has expired.
		g.Up, g.Held, g.State = bfd == bfdUp, true, StateHeld
		g.Usable = g.Up || g.evidence.failed.IsZero()
	default:
		g.evidence.released(at, bfd, lease.Since[family])
		g.Up, g.State = bfd == bfdUp, cmp.Or(bfd, "Down")
		g.Usable = g.Up || g.evidence.usable(at, lease.Since[family])
	}
}

func byKey(list []GatewayState) map[sessionKey]GatewayState {
	m := make(map[sessionKey]GatewayState, len(list))
	for _, g := range list {
		m[g.key()] = g
	}
	return m
}

// logTransitions logs session changes and reports whether a session came up. It logs each error
// only once until the session is up, because BIRD clears the error at each attempt and repeats it.
func (supervisor *Supervisor) logTransitions(before, after []GatewayState) (came bool) {
	was := byKey(before)
	for _, gateway := range after {
		switch {
		case gateway.Up && !was[gateway.key()].Up:
			came = true
			delete(supervisor.failures, gateway.key())
			supervisor.options.Log.Info("gateway session up", "gateway", gateway.Name, "address", gateway.Peer())
		case !gateway.Up && gateway.Held && was[gateway.key()].Up:
			supervisor.options.Log.Info("static gateway held down", "gateway", gateway.Name, "address", gateway.Peer())
		case !gateway.Up && was[gateway.key()].Up:
			supervisor.failures[gateway.key()] = gateway.LastError
			supervisor.options.Log.Warn("gateway session lost", "gateway", gateway.Name, "address", gateway.Peer(),
				"state", gateway.State, "last_error", gateway.LastError, "problem", gateway.Problem)
		case !gateway.Up && gateway.LastError != "" && gateway.LastError != supervisor.failures[gateway.key()]:
			supervisor.failures[gateway.key()] = gateway.LastError
			supervisor.options.Log.Warn("gateway session failed", "gateway", gateway.Name, "address", gateway.Peer(),
				"error", gateway.LastError)
		}
	}
	return came
}
