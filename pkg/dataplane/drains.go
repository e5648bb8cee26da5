package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// nextDrain is when the next drain ends that the engine looks after.
func (e *engine) nextDrain() (end time.Time, ok bool) {
	if e.wanted == nil {
		return end, false
	}
	for _, t := range e.installed.Targets {
		if !t.DrainEnd.IsZero() && (!ok || t.DrainEnd.Before(end)) {
			end, ok = t.DrainEnd, true
		}
	}
	return end, ok
}

// needed tells whether something of the kernel is to be looked at.
func (e *engine) needed() bool { return e.need.all || e.need.ways || e.need.around }

// waiting tells whether neighbours failed that may come back.
func (e *engine) waiting() bool { return e.around != nil && len(e.around.failed) > 0 }

// silent are the addresses of targets whose neighbours failed. Who is checked is asked
// by its checks, but not every family is checked.
func (e *engine) silent() map[netip.Addr]struct{} {
	silent := map[netip.Addr]struct{}{}
	if !e.waiting() {
		return silent
	}
	note := func(ips []netip.Addr) {
		for _, a := range ips {
			if _, failed := e.around.failed[a]; failed {
				silent[a] = struct{}{}
			}
		}
	}
	for _, m := range e.streams {
		for _, t := range m.targets {
			note(t.IPs)
		}
		if m.wanted != nil {
			for _, t := range m.wanted.Targets {
				note(t.IPs)
			}
		}
	}
	return silent
}

// unfinished tells whether another pass has something to do at once.
func (e *engine) unfinished() bool {
	if e.wanted == nil {
		return false
	}
	for _, m := range e.streams {
		if m.dirty && m.failure == nil {
			return true
		}
	}
	return false
}

// failing tells whether something is to be tried again.
func (e *engine) failing() bool {
	for _, m := range e.streams {
		if m.failure != nil {
			return true
		}
	}
	return false
}

// describe fills in what is known to be in the kernel.
func (e *engine) describe(s *State) {
	s.Streams = make(map[string]*StreamState, len(e.streams))
	s.VIPs = make(map[vip.VIP]string, len(e.owner))
	s.Unreachable = map[netip.Addr]string{}
	reach := func(ips []netip.Addr) {
		for _, a := range ips {
			if why := e.reason(a); why != "" {
				s.Unreachable[a] = why
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		m := e.streams[name]
		if m.state != nil {
			s.Streams[name] = m.state
		}
		for _, t := range m.targets {
			reach(t.IPs)
		}
		if m.wanted != nil {
			for _, t := range m.wanted.Targets {
				reach(t.IPs)
			}
		}
		s.Problems = append(s.Problems, m.problems...)
		r, recorded := e.installed.Streams[name]
		if !recorded || r.Stage == stageRemoving || e.actual.problem != "" || m.fault.bare {
			continue
		}
		for _, v := range r.VIPs {
			if e.actual.vips[v] == name {
				s.VIPs[v] = name
			}
		}
	}
	for narrow, wide := range e.share.within {
		if name, ok := s.VIPs[wide]; ok {
			s.VIPs[narrow] = name
		}
	}
	s.Drift = e.drift()
	s.Problems = append(s.Problems, e.share.problems...)
	for _, n := range slices.Sorted(maps.Keys(e.refused)) {
		s.Problems = append(s.Problems, Problem{Object: fmt.Sprintf("number %d", n), Detail: "another process uses it: " + e.refused[n], Remedy: "no action required: targets get other numbers"})
	}
}

// reason tells why an address cannot be reached, "" if it can or nobody knows.
func (e *engine) reason(a netip.Addr) string {
	if e.around == nil {
		return ""
	}
	return e.around.reason(a)
}

// reconcile reads everything and repairs it without back-off, except what is held.
func (e *engine) reconcile(w *Wanted) ([]Drift, error) {
	if w == nil || e.installed == nil {
		return nil, errors.New("nothing is configured yet; try again in a moment")
	}
	e.need.merge(need{all: true, ways: true, around: true})
	e.observe()
	if e.lookErr != nil {
		return nil, e.lookErr
	}
	before := e.drift()
	e.converge(w, true)
	if e.lookErr != nil {
		return nil, e.lookErr
	}
	left := e.drift()
	done := without(before, left)
	if left = slices.DeleteFunc(left, func(d Drift) bool { return e.held(d.Stream) }); len(left) > 0 {
		return done, fmt.Errorf("%d objects could not be repaired, the first is %s: %s", len(left), left[0].Object, left[0].Detail)
	}
	return done, nil
}

// slots lists the targets for people.
func (e *engine) slots() ([]SlotView, error) {
	if e.actual == nil {
		return nil, errors.New("the kernel could not be read yet")
	}
	now, err := e.kernel.readSlots(e.installedNumbers())
	if err != nil {
		return nil, fmt.Errorf("read the counters of targets: %w", err)
	}
	var list []SlotView
	for name, m := range e.streams {
		var entries [len(vip.Families)]map[uint32]int
		for _, f := range vip.Families {
			entries[f] = map[uint32]int{}
			if s := e.actual.streams[name]; s != nil {
				for _, number := range s.tables[f] {
					entries[f][number]++
				}
			}
		}
		for _, t := range m.targets {
			v := SlotView{Stream: t.Stream, Target: t.Name, Number: t.Number, IPs: t.IPs, State: m.stateOf(t), DrainEnd: t.DrainEnd}
			for _, f := range vip.Families {
				v.Entries[f] = entries[f][t.Number]
			}
			if s := now[t.Number]; s != nil {
				v.Packets, v.Bytes = s.packets, s.bytes
			}
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b SlotView) int {
		return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Target, b.Target))
	})
	return list, nil
}

// stateOf is a target's state in a word.
func (m *streamMemory) stateOf(t installedTarget) string {
	if t.Stage == stageRemoving {
		return "removing"
	}
	if slices.ContainsFunc(m.drift, func(d Drift) bool { return d.Target == t.Name }) {
		return "drifted"
	}
	if m.state != nil {
		for _, f := range vip.Families {
			if _, ok := m.state.Serving[f][t.Name]; ok {
				return "serving"
			}
		}
	}
	switch {
	case t.Stage == stagePending:
		return "pending"
	case t.Flows != [len(vip.Families)]bool{}:
		return "draining"
	}
	return "down"
}
