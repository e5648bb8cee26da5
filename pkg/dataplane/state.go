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

// nextDrain returns the end of the next drain that the engine began.
func (e *engine) nextDrain() (end time.Time, ok bool) {
	if e.desired == nil {
		return end, false
	}
	for _, t := range e.installed.Targets {
		if !t.DrainEnd.IsZero() && (!ok || t.DrainEnd.Before(end)) {
			end, ok = t.DrainEnd, true
		}
	}
	return end, ok
}

// mustRead reports whether a part of the kernel state is stale.
func (e *engine) mustRead() bool { return e.stale.nftables || e.stale.routes || e.stale.network }

// hasFailedNeighbors reports whether neighbors failed, which may recover.
func (e *engine) hasFailedNeighbors() bool {
	return e.network != nil && len(e.network.FailedNeighbors) > 0
}

// failedTargets returns the addresses of targets whose neighbors failed. Health checks probe
// them as well, but not in every family.
func (e *engine) failedTargets() map[netip.Addr]struct{} {
	silent := map[netip.Addr]struct{}{}
	if !e.hasFailedNeighbors() {
		return silent
	}
	note := func(ips []netip.Addr) {
		for _, a := range ips {
			if _, failed := e.network.FailedNeighbors[a]; failed {
				silent[a] = struct{}{}
			}
		}
	}
	for _, m := range e.streams {
		for _, t := range m.targets {
			note(t.IPs)
		}
		if m.desired != nil {
			for _, t := range m.desired.Targets {
				note(t.IPs)
			}
		}
	}
	return silent
}

// hasDirty reports whether another pass has something to plan at once.
func (e *engine) hasDirty() bool {
	if e.desired == nil {
		return false
	}
	for _, m := range e.streams {
		if m.dirty && m.failure == nil {
			return true
		}
	}
	return false
}

// failing reports whether a stream failed and is retried.
func (e *engine) failing() bool {
	for _, m := range e.streams {
		if m.failure != nil {
			return true
		}
	}
	return false
}

// describe fills in the confirmed state.
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
		if m.desired != nil {
			for _, t := range m.desired.Targets {
				reach(t.IPs)
			}
		}
		s.Problems = append(s.Problems, m.problems...)
		r, recorded := e.installed.Streams[name]
		if !recorded || r.Stage == plan.StageRemoving || e.observed.Problem != "" || m.fault.ChainMissing {
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
		s.Problems = append(s.Problems, Problem{Object: fmt.Sprintf("fwmark %d", n), Detail: "another process uses it: " + e.refused[n], Remedy: "no action required: a different fwmark is assigned"})
	}
}

// reason returns why an address cannot be reached, "" if it can or before the first read.
func (e *engine) reason(a netip.Addr) string {
	if e.network == nil {
		return ""
	}
	return e.network.UnreachableReason(a)
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
	for name, m := range e.streams {
		var entries [len(vip.Families)]map[uint32]int
		for _, f := range vip.Families {
			entries[f] = map[uint32]int{}
			if s := e.observed.Streams[name]; s != nil {
				for _, number := range s.Tables[f] {
					entries[f][number]++
				}
			}
		}
		for _, t := range m.targets {
			v := TargetView{Stream: t.Stream, Target: t.Name, FWMark: t.FWMark, IPs: t.IPs, State: m.stateOf(t), DrainEnd: t.DrainEnd}
			for _, f := range vip.Families {
				v.Entries[f] = entries[f][t.FWMark]
			}
			if s := now[t.FWMark]; s != nil {
				v.Packets, v.Bytes = s.Packets, s.Bytes
			}
			list = append(list, v)
		}
	}
	slices.SortFunc(list, func(a, b TargetView) int {
		return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Target, b.Target))
	})
	return list, nil
}

// stateOf returns the status word of a target.
func (m *streamRecord) stateOf(t plan.InstalledTarget) string {
	if t.Stage == plan.StageRemoving {
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
	case t.Stage == plan.StagePending:
		return "pending"
	case t.Flows != [len(vip.Families)]bool{}:
		return "draining"
	}
	return "down"
}
