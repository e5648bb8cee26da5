package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// deadlines returns the end times of holds, drains and repair back-offs.
func (e *engine) deadlines() (list []time.Time) {
	for _, until := range e.holds {
		if !until.IsZero() {
			list = append(list, until)
		}
	}
	if e.desired == nil || e.observed == nil {
		return list
	}
	list = slices.AppendSeq(list, maps.Values(e.draining))
	for _, d := range e.drift() {
		if r := e.repairs[d.Key()]; r != nil && !e.held(d.Stream) {
			list = append(list, r.next)
		}
	}
	return list
}

// hasFailedNeighbors reports whether the network has failed neighbors, which may recover.
func (e *engine) hasFailedNeighbors() bool {
	return e.network != nil && len(e.network.FailedNeighbors) > 0
}

// addresses yields the addresses of installed and desired targets.
func (m *streamRecord) addresses(yield func(netip.Addr) bool) {
	for _, t := range m.targets {
		for _, a := range t.IPs {
			if a.IsValid() && !yield(a) {
				return
			}
		}
	}
	if m.desired == nil {
		return
	}
	for _, t := range m.desired.Targets {
		for _, a := range t.IPs {
			if !yield(a) {
				return
			}
		}
	}
}

// unreachableIn returns the unreachable addresses in a network, with reasons. The result is cached
// until the network or the targets change: for a thousand targets the lookup took as long as the
// rest of the state.
func (m *streamRecord) unreachableIn(n *plan.Network) map[netip.Addr]string {
	if m.reachedIn == n {
		return m.unreachable
	}
	m.unreachable, m.reachedIn = nil, n
	for a := range m.addresses {
		if why := n.UnreachableReason(a); why != "" {
			if m.unreachable == nil {
				m.unreachable = map[netip.Addr]string{}
			}
			m.unreachable[a] = why
		}
	}
	return m.unreachable
}

// describe fills s with the confirmed state.
func (e *engine) describe(s *State) {
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		m := e.streams[name]
		if m.state != nil {
			s.Streams[name] = m.state
		}
		maps.Copy(s.Unreachable, m.unreachableIn(e.network))
		s.Problems = append(s.Problems, m.problems...)
		r := m.installed
		if r == nil || r.Stage == plan.StageRemoving || e.observed.Problem != "" || m.fault.ChainMissing {
			continue
		}
		for _, v := range r.VIPs {
			if e.observed.VIPs[v] == name {
				s.VIPs[v] = name
			}
		}
	}
	for narrow, wide := range e.vipOwners.Covered {
		if name, ok := s.VIPs[wide]; ok {
			s.VIPs[narrow] = name
		}
	}
	s.Drift = e.drift()
	s.Problems = append(s.Problems, e.vipOwners.Problems...)
	for _, n := range slices.Sorted(maps.Keys(e.refused)) {
		s.Problems = append(s.Problems, Problem{
			Object: fmt.Sprintf("fwmark %d", n), Detail: "another process uses it: " + e.refused[n],
			Remedy: "no action required: a different fwmark is assigned",
		})
	}
}

// listTargets lists the targets for operators.
func (e *engine) listTargets() ([]TargetView, error) {
	if e.observed == nil {
		return nil, errors.New("the kernel could not be read yet")
	}
	now, err := e.kernel.ReadTargets(e.installedFWMarks())
	if err != nil {
		return nil, fmt.Errorf("read the counters of targets: %w", err)
	}
	var list []TargetView
	entries := map[uint32][len(vip.Families)]int{}
	for _, s := range e.observed.Streams {
		for f, table := range s.Tables {
			for _, number := range table {
				count := entries[number]
				count[f]++
				entries[number] = count
			}
		}
	}
	for _, m := range e.streams {
		for _, t := range m.targets {
			counters := orNone(now[t.FWMark])
			list = append(list, TargetView{t, m.stateOf(t), entries[t.FWMark], counters.Packets, counters.Bytes})
		}
	}
	slices.SortFunc(list, func(a, b TargetView) int {
		return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Name, b.Name))
	})
	return list, nil
}

// unmatched returns the number of packets dropped by the match of each stream.
func (e *engine) unmatched() (map[string]uint64, error) {
	var streams []string
	for name, m := range e.streams {
		if m.installed != nil && m.installed.Match != nil {
			streams = append(streams, name)
		}
	}
	dropped, err := e.kernel.ReadUnmatched(streams)
	if err != nil {
		return nil, fmt.Errorf("read the counters of matches: %w", err)
	}
	return dropped, nil
}

// stateOf returns the status word of a target.
func (m *streamRecord) stateOf(t plan.InstalledTarget) string {
	switch {
	case t.Stage == plan.StageRemoving:
		return "removing"
	case slices.ContainsFunc(m.drift, func(d Drift) bool { return d.Target == t.Name }):
		return "drifted"
	case m.state != nil && slices.ContainsFunc(m.state.Serving[:], func(names map[string]struct{}) bool {
		_, ok := names[t.Name]
		return ok
	}):
		return "serving"
	case t.Stage == plan.StagePending:
		return "pending"
	case t.Flows != [len(vip.Families)]bool{}:
		return "draining"
	}
	return "down"
}
