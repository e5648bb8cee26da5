package dataplane

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// look reads from the kernel what has to be read.
func (e *engine) look() error {
	n := e.need
	if e.actual == nil {
		n.all = true
	}
	if n.all {
		if err := e.readAll(); err != nil {
			return err
		}
	} else if n.ways {
		if err := e.readWays(); err != nil {
			return err
		}
	}
	if n.all || n.ways || n.around {
		s, err := e.kernel.surroundings()
		if err != nil {
			return fmt.Errorf("look at links, addresses and neighbours: %w", err)
		}
		e.surround(s, n.downed)
	}
	e.need = need{}
	return nil
}

func (e *engine) installedNumbers() []uint32 {
	return slices.Sorted(maps.Keys(e.installed.Targets))
}

// readAll reads everything, between two transactions of anybody if they let us.
func (e *engine) readAll() error {
	for attempt := 1; ; attempt++ {
		before, err := e.kernel.generation()
		if err != nil {
			return fmt.Errorf("read the generation of the ruleset: %w", err)
		}
		c, err := e.kernel.read(e.installedNumbers())
		if err != nil {
			return fmt.Errorf("read the data plane: %w", err)
		}
		after, err := e.kernel.generation()
		if err != nil {
			return fmt.Errorf("read the generation of the ruleset: %w", err)
		}
		if before == after || attempt == 3 {
			e.setActual(c, before)
			return nil
		}
	}
}

func (e *engine) setActual(c *content, generation uint32) {
	if c.slots == nil {
		c.slots = map[uint32]*slotContent{}
	}
	if c.streams == nil {
		c.streams = map[string]*streamContent{}
	}
	if c.vips == nil {
		c.vips = map[vip.VIP]string{}
	}
	e.actual, e.generation, e.own = c, generation, e.kernel.transactions()
	for _, m := range e.streams {
		m.stale = true
	}
}

// foreignTransaction reports whether another process changed the ruleset since it was
// read.
func (e *engine) foreignTransaction() bool {
	if e.actual == nil {
		return true
	}
	g, err := e.kernel.generation()
	return err != nil || g != e.generation+e.kernel.transactions()-e.own
}

// readWays reads rules and routes of all targets.
func (e *engine) readWays() error {
	ways, err := e.kernel.readWays(e.installedNumbers())
	if err != nil {
		return fmt.Errorf("read rules and routes: %w", err)
	}
	base, problem, err := e.kernel.readBase()
	if err != nil {
		return fmt.Errorf("read what no target owns: %w", err)
	}
	if base != e.actual.base || problem != e.actual.problem {
		e.actual.base, e.actual.problem = base, problem
		for _, m := range e.streams {
			m.stale = true
		}
	}
	for number, t := range e.installed.Targets {
		now := ways[number]
		if now == nil {
			now = &slotContent{number: number}
		}
		s := e.actual.slots[number]
		if s == nil && sameWays(*now, slotContent{}) || s != nil && sameWays(*now, *s) {
			continue
		}
		e.setWays(number, *now)
		e.memory(t.Stream).stale = true
	}
	return nil
}

func (e *engine) setWays(number uint32, w slotContent) {
	s := slotContent{number: number}
	if old := e.actual.slots[number]; old != nil {
		s = *old
	}
	s.rules, s.hops, s.blackhole = w.rules, w.hops, w.blackhole
	e.actual.slots[number] = &s
}

// setElements takes what nftables has of a target; nil: nothing.
func (e *engine) setElements(number uint32, n *slotContent) {
	s := slotContent{number: number}
	if n != nil {
		s = *n
	}
	if old := e.actual.slots[number]; old != nil {
		s.rules, s.hops, s.blackhole = old.rules, old.hops, old.blackhole
	}
	if n == nil && sameWays(s, slotContent{}) {
		delete(e.actual.slots, number)
		return
	}
	e.actual.slots[number] = &s
}

// surround takes what is around: which targets can be reached, and whose routes the
// kernel removed when a link went down, rather than somebody.
func (e *engine) surround(s *surroundings, downed []int) {
	old := e.around
	e.around = s
	for number, t := range e.installed.Targets {
		m := e.memory(t.Stream)
		via := e.via[number]
		missing, byLink := false, false
		slot := e.actual.slots[number]
		for _, f := range vip.Families {
			hop := addressOf(t.IPs, f)
			if !hop.IsValid() {
				continue
			}
			l, ok := s.leadsTo(hop)
			if slot == nil || !slot.hops[f].IsValid() {
				missing = true
				// At the start nobody saw a link go: a route alone is missing after that,
				// where a hand that clears a table or a target takes more with it.
				alone := old == nil && !e.held(t.Stream) && slot != nil && slot.rules[f] && slot.blackhole[f]
				byLink = byLink || alone || !ok || !l.up || slices.Contains(downed, l.index) || via[f] != 0 && (via[f] != l.index || slices.Contains(downed, via[f]))
			}
			if ok {
				via[f] = l.index
			}
			if old == nil || (old.reason(hop) == "") != (s.reason(hop) == "") {
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
				e.log.Warn("the kernel removed routes with a link; they come back with it", "stream", t.Stream, "target", t.Name, "number", number)
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
		// Those that wait for their network are not installed, or not wholly.
		for name, m := range e.streams {
			if w := m.wanted; w != nil && !m.dirty {
				e.streams[name].dirty = slices.ContainsFunc(w.Targets, func(t Target) bool {
					return slices.ContainsFunc(t.IPs, func(a netip.Addr) bool { return (old.reason(a) == "") != (s.reason(a) == "") })
				})
			}
		}
	}
}

func (e *engine) logReach(t installedTarget, hop netip.Addr) {
	if why := e.around.reason(hop); why != "" {
		e.log.Warn("a target cannot be reached and leaves its table", "stream", t.Stream, "target", t.Name, "number", t.Number, "address", hop, "reason", why)
		return
	}
	e.log.Info("a target can be reached again", "stream", t.Stream, "target", t.Name, "number", t.Number, "address", hop)
}

// lostAndFound tells of a target whose routes went with a link that is there again.
func (e *engine) lostAndFound(number uint32) bool {
	if !e.lost[number] {
		return false
	}
	t, slot := e.installed.Targets[number], e.actual.slots[number]
	for _, f := range vip.Families {
		hop := addressOf(t.IPs, f)
		if !hop.IsValid() || slot != nil && slot.hops[f].IsValid() {
			continue
		}
		if l, ok := e.around.leadsTo(hop); ok && l.up {
			return true
		}
	}
	return false
}
