package dataplane

import (
	"cmp"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// diff compares installed and observed state of the streams for which either changed.
func (e *engine) diff() {
	for name, m := range e.streams {
		if !m.stale {
			continue
		}
		m.stale = false
		before, brokenBefore := m.drift, m.fault
		e.diffStream(name, m)
		if brokenBefore.Broken != m.fault.Broken || brokenBefore.ChainMissing != m.fault.ChainMissing || len(without(before, m.drift))+len(without(m.drift, before)) > 0 {
			m.dirty = true
		}
	}
	e.noteDrift()
}

func (e *engine) diffStream(name string, m *streamRecord) {
	m.drift, m.fault, m.state = nil, plan.StreamFault{}, nil
	s, ok := e.installed.Streams[name]
	if ok && s.Stage != plan.StageRemoving {
		var tables [len(vip.Families)][]uint32
		for _, f := range vip.Families {
			if plan.HasFamily(s.VIPs, f) {
				tables[f] = m.tables[f].Table(s.Tables[f], m.targets, s.Size, s.Seed)
			}
		}
		m.fault = plan.StreamDrift(s, tables, e.observed.Streams[name], e.observed.VIPs)
		if s.Stage == plan.StageApplied {
			m.drift = m.fault.Drift
		}
		m.state = e.streamState(s, m)
	}
	for _, t := range plan.SortedTargets(m.targets) {
		if t.Stage == plan.StageApplied {
			m.drift = append(m.drift, plan.TargetDrift(t, e.observed.Targets[t.FWMark], e.lost[t.FWMark])...)
		}
	}
}

// streamState returns the confirmed state of a stream.
func (e *engine) streamState(s plan.InstalledStream, m *streamRecord) *StreamState {
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
			if plan.Forwards(t, e.observed.Targets[t.FWMark], f) && e.network.UnreachableReason(plan.AddressOf(t.IPs, f)) == "" {
				x.Serving[f][name] = struct{}{}
			}
		}
		if len(s.Tables[f]) > 0 && len(x.Serving[f]) == 0 {
			x.Problem[f] = cmp.Or(x.Problem[f], "none of the targets in map "+plan.MaglevMap(f, s.Name)+" can be reached as it is")
		}
	}
	return x
}
