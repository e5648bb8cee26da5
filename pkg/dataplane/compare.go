package dataplane

import (
	"cmp"
	"maps"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// compare compares what is installed with the kernel, for the streams of which either changed.
func (e *engine) compare() {
	for name, m := range e.streams {
		if !m.stale {
			continue
		}
		m.stale = false
		before, brokenBefore := m.drift, m.fault
		e.compareStream(name, m)
		if brokenBefore.broken != m.fault.broken || brokenBefore.bare != m.fault.bare || len(without(before, m.drift))+len(without(m.drift, before)) > 0 {
			m.dirty = true
		}
	}
	e.noteDrift()
}

func (e *engine) compareStream(name string, m *streamMemory) {
	m.drift, m.fault, m.state = nil, streamFault{}, nil
	s, ok := e.installed.Streams[name]
	if ok && s.Stage != stageRemoving {
		var tables [len(vip.Families)][]uint32
		for _, f := range vip.Families {
			if hasFamily(s.VIPs, f) {
				tables[f] = m.tables[f].of(s.Tables[f], m.targets, s.Size, s.Seed)
			}
		}
		m.fault = streamDrift(s, tables, e.actual.streams[name], e.actual.vips)
		if s.Stage == stageApplied {
			m.drift = m.fault.drift
		}
		m.state = e.streamState(s, m)
	}
	for _, t := range sortedTargets(m.targets) {
		if t.Stage == stageApplied {
			m.drift = append(m.drift, slotDrift(t, e.actual.slots[t.Number], e.lost[t.Number])...)
		}
	}
}

// streamState tells what of a stream is known to be in the kernel.
func (e *engine) streamState(s installedStream, m *streamMemory) *StreamState {
	x := &StreamState{Problem: m.fault.problems}
	a := e.actual.streams[s.Name]
	for _, f := range vip.Families {
		x.Serving[f] = map[string]struct{}{}
		if !hasFamily(s.VIPs, f) {
			continue
		}
		if p := e.actual.problem; p != "" {
			x.Problem[f] = cmp.Or(x.Problem[f], "table inet "+TableName+": "+p)
		}
		if a == nil || a.tables[f] == nil {
			continue
		}
		for _, name := range s.Tables[f] {
			t := m.targets[name]
			if slotStands(t, e.actual.slots[t.Number], f) && e.around.reason(addressOf(t.IPs, f)) == "" {
				x.Serving[f][name] = struct{}{}
			}
		}
		if len(s.Tables[f]) > 0 && len(x.Serving[f]) == 0 {
			x.Problem[f] = cmp.Or(x.Problem[f], "none of the targets in map "+maglevMap(f, s.Name)+" can be reached as it is")
		}
	}
	return x
}

// maxTold is how many objects that differ, or no longer do, are logged one by one at
// once: deleting a whole table changes thousands.
const maxTold = 20

// noteDrift remembers since when what differs, and says so once.
func (e *engine) noteDrift() {
	all := e.drift()
	now := e.now()
	is := make(map[driftKey]bool, len(all))
	come, gone := 0, 0
	for _, d := range all {
		is[d.key()] = true
		if _, known := e.since[d.key()]; known {
			continue
		}
		e.since[d.key()] = now
		if come++; come <= maxTold {
			e.log.Warn("drift detected", "object", d.Object, "detail", d.Detail, "stream", d.Stream, "target", d.Target, "held", e.held(d.Stream))
		}
	}
	for k := range e.since {
		if is[k] {
			continue
		}
		delete(e.since, k)
		if gone++; gone <= maxTold {
			e.log.Info("drift resolved", "object", k.object, "stream", k.stream, "target", k.target)
		}
	}
	if come > maxTold {
		e.log.Warn("more drift detected", "objects", come-maxTold)
	}
	if gone > maxTold {
		e.log.Info("more drift resolved", "objects", gone-maxTold)
	}
}

// hasApplied reports whether a stream is installed, so that what no stream owns must be
// as well.
func (e *engine) hasApplied() bool {
	for _, s := range e.installed.Streams {
		if s.Stage == stageApplied {
			return true
		}
	}
	return false
}

// drift lists what differs from what is installed, sorted.
func (e *engine) drift() []Drift {
	all := e.baseDrift()
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		all = append(all, e.streams[name].drift...)
	}
	for i, d := range all {
		all[i].Since = e.since[d.key()]
	}
	return all
}
