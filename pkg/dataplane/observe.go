package dataplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// observe reads the stale parts of the kernel, if read is set, and compares them with the
// installed state.
func (e *engine) observe(read bool) {
	e.readErr = nil
	if e.network == nil || read && e.stale != 0 {
		e.lastRead = time.Now()
		e.readErr = e.readKernel()
		e.readTime = time.Since(e.lastRead)
	}
	if e.readErr == nil {
		e.diff()
	}
}

// readKernel reads the stale parts of the kernel state.
func (e *engine) readKernel() error {
	switch {
	case e.observed == nil || e.stale&nftables != 0:
		if err := e.readAll(); err != nil {
			return err
		}
	case e.stale&routes != 0:
		if err := e.readRoutes(); err != nil {
			return err
		}
	}
	s, err := e.kernel.ReadNetwork()
	if err != nil {
		return fmt.Errorf("read links, addresses and neighbors: %w", err)
	}
	if e.stale&nftables != 0 {
		e.lastFullRead = e.lastRead
	}
	e.updateNetwork(s)
	e.stale, e.linksDown = 0, nil
	return nil
}

func (e *engine) installedFWMarks() []uint32 {
	return slices.Sorted(maps.Keys(e.targets))
}

// readAll reads everything. It retries up to twice to obtain a dump without a concurrent
// transaction.
func (e *engine) readAll() error {
	for attempt := 1; ; attempt++ {
		before, err := e.kernel.Generation()
		if err != nil {
			return err
		}
		c, err := e.kernel.Read(e.installedFWMarks())
		if err != nil {
			return fmt.Errorf("read the data plane: %w", err)
		}
		after, err := e.kernel.Generation()
		if err != nil {
			return err
		}
		if before == after || attempt == 3 {
			e.observed, e.generation, e.ownTransactions = c, before, e.kernel.Transactions()
			e.staleStreams()
			return nil
		}
	}
}

// foreignTransaction reports whether another process changed the ruleset since the last read. It
// excludes the generation's increments by transactions of this connection.
func (e *engine) foreignTransaction() bool {
	if e.observed == nil {
		return true
	}
	g, err := e.kernel.Generation()
	return err != nil || g != e.generation+e.kernel.Transactions()-e.ownTransactions
}

// readBase reads the common objects.
func (e *engine) readBase() error {
	base, problem, err := e.kernel.ReadBase()
	if err != nil {
		return fmt.Errorf("read table inet %s: %w", TableName, err)
	}
	if base != e.observed.Base || problem != e.observed.Problem {
		e.observed.Base, e.observed.Problem = base, problem
		e.staleStreams()
	}
	return nil
}

// readRoutes reads the rules and routes of all targets, and the common policy rules.
func (e *engine) readRoutes() error {
	read, err := e.kernel.ReadRoutes(e.installedFWMarks())
	if err != nil {
		return fmt.Errorf("read rules and routes: %w", err)
	}
	if err := e.readBase(); err != nil {
		return err
	}
	for number, t := range e.targets {
		if now, old := orNone(read[number]), orNone(e.observed.Targets[number]); !plan.SameRoutes(now, old) {
			e.setRoutes(number, now)
			e.record(t.Stream).stale = true
		}
	}
	return nil
}

// orNone returns an empty target for nil.
func orNone(t *plan.KernelTarget) plan.KernelTarget {
	if t == nil {
		return plan.KernelTarget{}
	}
	return *t
}

// setRoutes sets the observed rules and routes of a target.
func (e *engine) setRoutes(number uint32, r plan.KernelTarget) {
	e.setTarget(number, orNone(e.observed.Targets[number]), r)
}

// setTarget sets the observed state of a target: its nftables objects from s, its rules and routes
// from r.
func (e *engine) setTarget(number uint32, s, r plan.KernelTarget) {
	s.FWMark, s.Rules, s.NextHops, s.Blackhole = number, r.Rules, r.NextHops, r.Blackhole
	if plan.SameRoutes(s, plan.KernelTarget{}) && plan.SameNFTables(s, plan.KernelTarget{}) {
		delete(e.observed.Targets, number)
	} else {
		e.observed.Targets[number] = &s
	}
}

// updateNetwork sets the observed network. It derives the reachability of targets, and separates
// routes that the kernel removed with a link from routes that another process removed.
func (e *engine) updateNetwork(s *plan.Network) {
	first, old := e.network == nil, cmp.Or(e.network, &plan.Network{})
	e.network = s
	reachable := func(n *plan.Network, a netip.Addr) bool { return n.UnreachableReason(a) == "" }
	for number, t := range e.targets {
		m := e.record(t.Stream)
		missing, byLink := false, false
		slot := orNone(e.observed.Targets[number])
		for _, f := range vip.Families {
			hop := t.IPs[f]
			if !hop.IsValid() {
				continue
			}
			l, ok := s.LinkTo(hop)
			was, known := old.LinkTo(hop)
			if !slot.NextHops[f].IsValid() {
				missing = true
				// No link notification exists at the start. If only the route is missing,
				// the kernel removed it with a link; an operator removes more objects.
				alone := first && !e.held(t.Stream) && slot.Rules[f] && slot.Blackhole[f]
				moved := known && was.Index != l.Index
				byLink = byLink || alone || moved || !ok || !l.Up || slices.Contains(e.linksDown, l.Index)
			}
			if changed := reachable(old, hop) != reachable(s, hop); changed || first {
				m.dirty, m.stale = true, true
				if !first {
					e.logReach(t, hop)
				}
			}
		}
		lost := missing && (byLink || e.lost[number])
		if lost && !e.lost[number] {
			e.log.Warn("routes removed with their link; restoring them when it is up",
				"stream", t.Stream, "target", t.Name, "fwmark", number)
		}
		m.stale = m.stale || lost != e.lost[number]
		m.dirty = m.dirty || lost
		delete(e.lost, number)
		if lost {
			e.lost[number] = true
		}
	}
	if first {
		return
	}
	// Also check desired targets that are not installed for lack of a connected network.
	for _, m := range e.streams {
		for a := range m.addresses {
			m.dirty = m.dirty || reachable(old, a) != reachable(s, a)
		}
	}
}

func (e *engine) logReach(t plan.InstalledTarget, hop netip.Addr) {
	log := e.log.With("stream", t.Stream, "target", t.Name, "fwmark", t.FWMark, "address", hop)
	if why := e.network.UnreachableReason(hop); why != "" {
		log.Warn("target unreachable, removing it from its table", "reason", why)
		return
	}
	log.Info("target reachable again")
}

// linkRestored reports whether the kernel removed routes of a target with a link that is up again.
func (e *engine) linkRestored(number uint32) bool {
	if !e.lost[number] {
		return false
	}
	slot := orNone(e.observed.Targets[number])
	for f, hop := range e.targets[number].IPs {
		if hop.IsValid() && !slot.NextHops[f].IsValid() {
			if l, ok := e.network.LinkTo(hop); ok && l.Up {
				return true
			}
		}
	}
	return false
}

// diff compares installed with observed state of the streams where either changed.
func (e *engine) diff() {
	for name, m := range e.streams {
		if !m.stale {
			continue
		}
		m.stale = false
		before, fault := m.drift, m.fault
		e.diffStream(name, m)
		m.dirty = m.dirty || fault.Broken != m.fault.Broken || fault.ChainMissing != m.fault.ChainMissing ||
			len(plan.Without(before, m.drift, Drift.Key))+len(plan.Without(m.drift, before, Drift.Key)) > 0
	}
	e.noteDrift()
}

func (e *engine) diffStream(name string, m *streamRecord) {
	m.drift, m.fault, m.state = nil, plan.StreamFault{}, nil
	if s := m.installed; s != nil && s.Stage != plan.StageRemoving {
		m.fault = plan.StreamDrift(*s, s.Kernel(m.targets, &m.tables), e.observed.Streams[name], e.observed.VIPs)
		if s.Stage == plan.StageApplied {
			m.drift = m.fault.Drift
		}
		m.state = e.streamState(s, m)
	}
	if m.desired == nil && len(m.targets) > 0 || m.desired != nil && m.desired.RouteAll {
		m.state = cmp.Or(m.state, &StreamState{})
		m.state.FWMarks = e.routedFWMarks(m)
	}
	for _, t := range plan.SortedTargets(m.targets) {
		if t.Stage == plan.StageApplied {
			m.drift = append(m.drift, plan.TargetDrift(t, e.observed.Targets[t.FWMark], e.lost[t.FWMark])...)
		}
	}
}

// streamState returns the confirmed state of a stream.
func (e *engine) streamState(s *plan.InstalledStream, m *streamRecord) *StreamState {
	x := &StreamState{Problem: m.fault.Problems}
	a := e.observed.Streams[s.Name]
	for _, f := range vip.Families {
		x.Serving[f] = map[string]struct{}{}
		if !plan.HasFamily(s.VIPs, f) {
			continue
		}
		if p := e.observed.Problem; p != "" {
			x.Problem[f] = cmp.Or(x.Problem[f], "table inet "+TableName+": "+p)
		}
		if a == nil || a.Tables[f] == nil {
			continue
		}
		for _, name := range s.Tables[f] {
			t := m.targets[name]
			if plan.Forwards(t, e.observed.Targets[t.FWMark], f) && e.network.UnreachableReason(t.IPs[f]) == "" {
				x.Serving[f][name] = struct{}{}
			}
		}
		if len(s.Tables[f]) > 0 && len(x.Serving[f]) == 0 {
			x.Problem[f] = cmp.Or(x.Problem[f],
				"none of the targets in map "+plan.MaglevMap(f, s.Name)+" can be reached as it is")
		}
	}
	return x
}

// routedFWMarks returns the fwmarks of a stream's targets with installed rules and routes.
func (e *engine) routedFWMarks(m *streamRecord) map[netip.Addr]uint32 {
	marks := make(map[netip.Addr]uint32, len(m.targets))
	for _, t := range m.targets {
		slot := e.observed.Targets[t.FWMark]
		for f, hop := range t.IPs {
			if slot != nil && t.Stage != plan.StageRemoving && hop.IsValid() && slot.Rules[f] && slot.NextHops[f] == hop {
				marks[hop] = t.FWMark
			}
		}
	}
	return marks
}
