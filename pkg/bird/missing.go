package bird

import (
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// lackTime is how long BIRD may lack a protocol of the loaded configuration. BIRD removes a
// changed protocol for milliseconds during a reload.
const lackTime = 5 * time.Second

// missing tracks protocols that BIRD lacks because another process has reconfigured it.
type missing struct {
	since    time.Time // zero if BIRD has all protocols
	attempts retries
}

func (input renderInput) protocols() []string {
	names := []string{LoopbackName, "KERNEL4", "KERNEL6"}
	if slices.ContainsFunc(input.Sessions, func(s Session) bool { return s.BFD != nil }) {
		names = append(names, bfdName)
	}
	if input.Advertise {
		names = append(names, radvName)
	}
	for _, family := range vip.Families {
		if slices.ContainsFunc(input.nextHops(), func(n nextHops) bool { return n.Name == vrrpName(family) }) {
			names = append(names, vrrpName(family))
		}
	}
	for _, session := range input.Sessions {
		if session.Attracts() {
			names = append(names, gatewayPrefix+session.Name)
		}
		if session.Protocol == trench.Static && session.BFD != nil && len(input.VRRP) == 0 {
			names = append(names, egressPrefix+session.Name)
		}
	}
	return names
}

// observe reports whether BIRD must be configured again, since it has lacked a protocol for
// lackTime. A missing loopback session needs no wait: no configuration of this process lacks it.
func (m *missing) observe(now time.Time, lacking, loopback bool) bool {
	if !lacking {
		// Keep the back-off for a while: the other process may reconfigure BIRD periodically.
		m.since = time.Time{}
		if now.Sub(m.attempts.notBefore) > m.attempts.delay.Max {
			m.attempts = retries{}
		}
		return false
	}
	if m.since.IsZero() {
		m.since = now
	}
	if !loopback && now.Sub(m.since) < lackTime || now.Before(m.attempts.notBefore) {
		return false
	}
	m.attempts.failed(now)
	return true
}

// restore requests a reload of the current configuration if BIRD lacks some of its protocols.
func (supervisor *Supervisor) restore(now time.Time, protocols map[string]Protocol) {
	lacking := slices.DeleteFunc(slices.Clone(supervisor.apply.current.protocols), func(name string) bool {
		_, has := protocols[name]
		return has
	})
	if !supervisor.missing.observe(now, len(lacking) > 0, slices.Contains(lacking, LoopbackName)) {
		return
	}
	supervisor.options.Log.Warn("BIRD lacks protocols of its configuration, configuring it again: "+
		"another process configured it", "protocols", lacking, "attempts", supervisor.missing.attempts.failures)
	supervisor.apply.again = true
	supervisor.state.Update(func(st State) State { st.Restores++; return st })
}
