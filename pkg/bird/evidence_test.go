package bird

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/trench"
)

// staticModel models a static gateway and a load balancer that is available only while a gateway
// is usable, like the load balancer of Meridio 1.x.
type staticModel struct {
	t          *testing.T
	now        time.Time
	resolution resolution
	state      State

	alive     bool // the gateway sends packets
	deaf      bool // and receives none
	passive   bool // it sends packets only in response
	answers   bool // the load balancer does not depend on the gateway
	noTargets bool // the load balancer is unavailable
	noBIRD    bool
	lease     bfdlease.State
	bfd       string
	upAt      time.Time // when the session comes up; zero: it does not
	releases  int
}

func newStaticModel(t *testing.T) *staticModel {
	g := staticSession("g", "10.0.0.1", &trench.BFD{MinTx: time.Second}).Gateway
	return &staticModel{
		t: t, now: time.Now(), bfd: "Down", alive: true,
		resolution: resolution{gateways: []trench.Gateway{g}, input: renderInput{Interface: "ext-vlan"}},
	}
}

func (m *staticModel) gateway() GatewayState { return m.state.Gateways[0] }

// run polls each 100 ms for a time.
func (m *staticModel) run(d time.Duration) {
	const poll = 100 * time.Millisecond
	for end := m.now.Add(d); m.now.Before(end); m.now = m.now.Add(poll) {
		m.session()
		protocols := map[string]Protocol{"NBR-g": {Name: "NBR-g", State: "up"}}
		if m.noBIRD {
			protocols = nil
		}
		bfd := map[netip.Addr]string{netip.MustParseAddr("10.0.0.1"): m.bfd}
		m.state.Gateways = m.resolution.states(m.now, protocols, bfd, m.lease, m.state)
		if wanted := !m.noTargets && (m.answers || m.gateway().Usable); wanted != m.lease.Attract[0] {
			m.lease.Attract[0], m.lease.Since[0] = wanted, m.now
			if wanted {
				m.releases++
			}
		}
	}
}

// session is BFD: packets of the frontend leave while the lease attracts.
func (m *staticModel) session() {
	sent := m.lease.Attract[0] && !m.noBIRD
	switch {
	case !m.alive, m.noBIRD, m.passive && !sent:
		m.bfd, m.upAt = "Down", time.Time{}
	case !sent || m.deaf:
		m.bfd, m.upAt = "Init", time.Time{}
	case m.upAt.IsZero():
		m.bfd, m.upAt = "Init", m.now.Add(time.Second)
	case !m.now.Before(m.upAt):
		m.bfd = bfdUp
	}
}

func (m *staticModel) want(what string, up, usable bool, releases int) {
	m.t.Helper()
	if g := m.gateway(); g.Up != up || g.Usable != usable || m.releases > releases {
		m.t.Errorf("%s: up %t, usable %t, %d releases, want %t, %t, at most %d; %+v",
			what, g.Up, g.Usable, m.releases, up, usable, releases, g.evidence)
	}
	m.releases = 0
}

func TestDeadStaticGateway(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(m *staticModel){
		"lost, and back": func(m *staticModel) {
			m.run(5 * time.Second)
			m.want("start", true, true, 1)
			m.alive = false
			m.run(9 * time.Minute)
			m.want("dead", false, false, 0)
			m.alive = true
			m.run(5 * time.Second)
			m.want("back", true, true, 1)
			m.alive = false
			m.run(time.Second)
			m.alive = true
			m.run(3 * time.Second)
			m.want("back after a short loss", true, true, 1)
		},
		"dead from the start": func(m *staticModel) {
			m.alive = false
			m.run(9 * time.Minute)
			m.want("dead", false, false, 1)
			m.run(time.Hour)
			m.want("dead for an hour", false, false, 6)
			m.alive = true
			m.run(5 * time.Second)
			m.want("back", true, true, 1)
		},
		"passive gateway": func(m *staticModel) {
			m.passive = true
			m.run(5 * time.Second)
			m.want("start", true, true, 1)
			m.alive = false
			m.run(time.Minute)
			m.alive = true
			m.run(time.Minute)
			m.want("silent", false, false, 0)
			m.run(maxRelease)
			m.want("released in the end", true, true, 1)
		},
		"packets of the frontend do not arrive": func(m *staticModel) {
			m.run(5 * time.Second)
			m.releases, m.deaf = 0, true
			m.run(9 * time.Minute)
			m.want("deaf", false, false, 1)
			m.deaf = false
			m.run(maxRelease)
			m.want("released in the end", true, true, 1)
		},
		"packets that come and go": func(m *staticModel) {
			m.deaf = true
			for range 60 {
				m.alive = !m.alive
				m.run(10 * time.Second)
			}
			m.want("no session", false, false, 8) // 5 s, 10 s, … 10 min apart
			m.deaf, m.alive = false, true
			m.run(maxRelease)
			m.want("up", true, true, 1)
			m.alive = false
			m.run(time.Second)
			m.noTargets = true
			m.run(time.Second)
			m.alive, m.noTargets = true, false
			m.run(3 * time.Second)
			m.want("up again", true, true, 1)
			m.noTargets = true
			m.run(time.Second)
			m.alive, m.noTargets = false, false
			m.run(4 * time.Second)
			m.alive = true
			m.run(minRelease + 2*time.Second)
			m.want("delays begin again", true, true, 2)
		},
		"down while it is held down": func(m *staticModel) {
			m.answers = true
			m.run(5 * time.Second)
			m.alive = false
			m.run(5 * time.Second)
			m.want("down", false, false, 1)
			m.answers = false
			m.run(time.Minute)
			m.want("held down", false, false, 0)
			m.answers, m.alive = true, true
			m.run(5 * time.Second)
			m.want("up", true, true, 1)
			m.answers, m.noTargets = false, true
			m.run(time.Second)
			m.answers, m.noTargets, m.alive = true, false, false
			m.run(time.Minute)
			m.want("not up", false, false, 1)
			m.noTargets = true
			m.run(time.Second)
			m.want("held down", false, false, 0)
			m.alive = true
			m.run(time.Second)
			m.want("heard", false, true, 0)
			m.alive, m.noTargets = false, false
			m.run(time.Minute)
			m.releases, m.noTargets = 0, true
			m.run(time.Second)
			m.noTargets = false
			m.run(time.Second)
			m.want("released, not up yet", false, false, 1)
			m.alive = true
			m.run(2 * time.Second)
			m.want("up", true, true, 0)
		},
		"alive while it is held down": func(m *staticModel) {
			m.run(5 * time.Second)
			m.want("up", true, true, 1)
			m.noTargets = true
			m.run(time.Hour)
			m.want("held down", false, true, 0)
			m.deaf, m.noTargets = true, false
			m.run(2 * time.Second)
			m.want("released", false, true, 1)
			m.run(9 * time.Minute)
			m.want("deaf", false, false, 0)
		},
		"replaced while it is up": func(m *staticModel) {
			m.run(time.Minute)
			m.releases, m.resolution.input.Interface = 0, "other"
			m.bfd, m.upAt = "Down", time.Time{}
			m.run(4 * time.Second)
			m.want("replaced", true, true, 2)
		},
		"restarts of BIRD": func(m *staticModel) {
			m.run(5 * time.Second)
			m.noBIRD = true
			m.run(2 * time.Second)
			m.noBIRD = false
			m.run(5 * time.Second)
			m.want("restart", true, true, 2)
			m.alive = false
			m.run(time.Minute)
			m.want("dead", false, false, 0)
			m.noBIRD = true
			m.run(2 * time.Second)
			m.noBIRD = false
			m.run(time.Minute)
			m.want("dead, and BIRD restarted", false, false, 0)
			m.resolution.problems = map[string]string{"g": "no address"}
			m.run(time.Second)
			m.resolution.problems = nil
			m.state.ConfigErr = errors.New("refused")
			m.run(time.Minute)
			m.want("dead, and a configuration refused", false, false, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(newStaticModel(t))
		})
	}
}

// Only a change of the gateway's own configuration makes a dead gateway usable again.
func TestDeadStaticGatewayForgotten(t *testing.T) {
	t.Parallel()
	other := staticSession("h", "10.0.0.2", nil).Gateway
	for name, tt := range map[string]struct {
		change  func(v *resolution)
		forgets bool
	}{
		"none":        {func(*resolution) {}, false},
		"generation":  {func(v *resolution) { v.generation++ }, false},
		"another one": {func(v *resolution) { v.gateways = append(v.gateways, other) }, false},
		"equal BFD": {func(v *resolution) {
			bfd := *v.gateways[0].BFD
			v.gateways[0].BFD = &bfd
		}, false},
		"BFD":       {func(v *resolution) { v.gateways[0].BFD = &trench.BFD{MinTx: time.Minute} }, true},
		"address":   {func(v *resolution) { v.gateways[0].Address = netip.MustParseAddr("10.0.0.7") }, true},
		"no BFD":    {func(v *resolution) { v.gateways[0].BFD = nil }, true},
		"interface": {func(v *resolution) { v.input.Interface = "other" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newStaticModel(t)
			m.alive = false
			m.run(time.Minute)
			m.resolution.gateways = append([]trench.Gateway{}, m.resolution.gateways...)
			tt.change(&m.resolution)
			protocols := map[string]Protocol{"NBR-g": {State: "up"}, "NBR-h": {State: "up"}}
			got := m.resolution.states(m.now, protocols, nil, bfdlease.State{}, m.state)[0]
			if got.Usable != tt.forgets {
				t.Errorf("usable %t after the change, want %t", got.Usable, tt.forgets)
			}
		})
	}
}
