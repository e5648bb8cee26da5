package dataplane

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// readKernel reads the stale parts of the kernel state.
func (e *engine) readKernel() error {
	n := e.stale
	if e.observed == nil {
		n.nftables = true
	}
	if n.nftables {
		if err := e.readAll(); err != nil {
			return err
		}
	} else if n.routes {
		if err := e.readRoutes(); err != nil {
			return err
		}
	}
	if n.nftables || n.routes || n.network {
		s, err := e.kernel.ReadNetwork()
		if err != nil {
			return fmt.Errorf("read links, addresses and neighbors: %w", err)
		}
		e.updateNetwork(s, n.linksDown)
	}
	e.stale = staleParts{}
	return nil
}

func (e *engine) installedFWMarks() []uint32 {
	return slices.Sorted(maps.Keys(e.installed.Targets))
}

// readAll reads everything, between two transactions if the other processes pause long enough.
func (e *engine) readAll() error {
	for attempt := 1; ; attempt++ {
		before, err := e.kernel.Generation()
		if err != nil {
			return fmt.Errorf("read the generation of the ruleset: %w", err)
		}
		c, err := e.kernel.Read(e.installedFWMarks())
		if err != nil {
			return fmt.Errorf("read the data plane: %w", err)
		}
		after, err := e.kernel.Generation()
		if err != nil {
			return fmt.Errorf("read the generation of the ruleset: %w", err)
		}
		if before == after || attempt == 3 {
			e.setActual(c, before)
			return nil
		}
	}
}

func (e *engine) setActual(c *plan.KernelState, generation uint32) {
	if c.Targets == nil {
		c.Targets = map[uint32]*plan.KernelTarget{}
	}
	if c.Streams == nil {
		c.Streams = map[string]*plan.KernelStream{}
	}
	if c.VIPs == nil {
		c.VIPs = map[vip.VIP]string{}
	}
	e.observed, e.generation, e.ownTransactions = c, generation, e.kernel.Transactions()
	for _, m := range e.streams {
		m.stale = true
	}
}

// foreignTransaction reports whether another process changed the ruleset since it was
// read.
func (e *engine) foreignTransaction() bool {
	if e.observed == nil {
		return true
	}
	g, err := e.kernel.Generation()
	return err != nil || g != e.generation+e.kernel.Transactions()-e.ownTransactions
}

// readRoutes reads the rules and routes of all targets.
func (e *engine) readRoutes() error {
	ways, err := e.kernel.ReadRoutes(e.installedFWMarks())
	if err != nil {
		return fmt.Errorf("read rules and routes: %w", err)
	}
	base, problem, err := e.kernel.ReadBase()
	if err != nil {
		return fmt.Errorf("read common objects: %w", err)
	}
	if base != e.observed.Base || problem != e.observed.Problem {
		e.observed.Base, e.observed.Problem = base, problem
		for _, m := range e.streams {
			m.stale = true
		}
	}
	for number, t := range e.installed.Targets {
		now := ways[number]
		if now == nil {
			now = &plan.KernelTarget{FWMark: number}
		}
		s := e.observed.Targets[number]
		if s == nil && plan.SameRoutes(*now, plan.KernelTarget{}) || s != nil && plan.SameRoutes(*now, *s) {
			continue
		}
		e.setRoutes(number, *now)
		e.record(t.Stream).stale = true
	}
	return nil
}

func (e *engine) setRoutes(number uint32, w plan.KernelTarget) {
	s := plan.KernelTarget{FWMark: number}
	if old := e.observed.Targets[number]; old != nil {
		s = *old
	}
	s.Rules, s.NextHops, s.Blackhole = w.Rules, w.NextHops, w.Blackhole
	e.observed.Targets[number] = &s
}

// setNFTables sets the observed nftables objects of a target; nil for none.
func (e *engine) setNFTables(number uint32, n *plan.KernelTarget) {
	s := plan.KernelTarget{FWMark: number}
	if n != nil {
		s = *n
	}
	if old := e.observed.Targets[number]; old != nil {
		s.Rules, s.NextHops, s.Blackhole = old.Rules, old.NextHops, old.Blackhole
	}
	if n == nil && plan.SameRoutes(s, plan.KernelTarget{}) {
		delete(e.observed.Targets, number)
		return
	}
	e.observed.Targets[number] = &s
}

// updateNetwork sets the observed network, and derives which targets can be reached and whose
// routes the kernel, rather than another process, removed when a link went down.
func (e *engine) updateNetwork(s *plan.Network, downed []int) {
	old := e.network
	e.network = s
	for number, t := range e.installed.Targets {
		m := e.record(t.Stream)
		via := e.via[number]
		missing, byLink := false, false
		slot := e.observed.Targets[number]
		for _, f := range vip.Families {
			hop := plan.AddressOf(t.IPs, f)
			if !hop.IsValid() {
				continue
			}
			l, ok := s.LinkTo(hop)
			if slot == nil || !slot.NextHops[f].IsValid() {
				missing = true
				// At the start no notification of a link exists. The kernel removes only
				// the route; an operator who clears a table or a target removes more.
				alone := old == nil && !e.held(t.Stream) && slot != nil && slot.Rules[f] && slot.Blackhole[f]
				byLink = byLink || alone || !ok || !l.Up || slices.Contains(downed, l.Index) || via[f] != 0 && (via[f] != l.Index || slices.Contains(downed, via[f]))
			}
			if ok {
				via[f] = l.Index
			}
			if old == nil || (old.UnreachableReason(hop) == "") != (s.UnreachableReason(hop) == "") {
				m.dirty, m.stale = true, true
				if old != nil {
					e.logReach(t, hop)
				}
			}
		}
		e.via[number] = via
		lost := missing && (byLink || e.lost[number])
		if lost != e.lost[number] {
			m.stale = true
			if lost {
				e.log.Warn("routes removed with their link; restoring them when it is up", "stream", t.Stream, "target", t.Name, "fwmark", number)
			}
		}
		if lost {
			e.lost[number] = true
			m.dirty = true
		} else {
			delete(e.lost, number)
		}
	}
	if old != nil {
		// Targets without a connected network are not, or not completely, installed.
		for name, m := range e.streams {
			if w := m.desired; w != nil && !m.dirty {
				e.streams[name].dirty = slices.ContainsFunc(w.Targets, func(t Target) bool {
					return slices.ContainsFunc(t.IPs, func(a netip.Addr) bool { return (old.UnreachableReason(a) == "") != (s.UnreachableReason(a) == "") })
				})
			}
		}
	}
}

func (e *engine) logReach(t plan.InstalledTarget, hop netip.Addr) {
	if why := e.network.UnreachableReason(hop); why != "" {
		e.log.Warn("target unreachable, removing it from its table", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark, "address", hop, "reason", why)
		return
	}
	e.log.Info("target reachable again", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark, "address", hop)
}

// linkRestored reports whether the kernel removed the routes of a target with a link that is up
// again.
func (e *engine) linkRestored(number uint32) bool {
	if !e.lost[number] {
		return false
	}
	t, slot := e.installed.Targets[number], e.observed.Targets[number]
	for _, f := range vip.Families {
		hop := plan.AddressOf(t.IPs, f)
		if !hop.IsValid() || slot != nil && slot.NextHops[f].IsValid() {
			continue
		}
		if l, ok := e.network.LinkTo(hop); ok && l.Up {
			return true
		}
	}
	return false
}
