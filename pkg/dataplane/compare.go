package dataplane

import (
	"cmp"
	"maps"
	"slices"
	"time"

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

// noteDrift remembers since when objects differ, and logs what is new.
func (e *engine) noteDrift() {
	since := map[driftKey]time.Time{}
	var found []Drift
	for _, d := range e.drift() {
		at, known := e.since[d.key()]
		if !known {
			at = e.now()
			found = append(found, d)
		}
		since[d.key()] = at
	}
	if len(found) > 0 {
		d := found[0]
		e.log.Warn("drift detected", "objects", len(found), "first", d.Object, "detail", d.Detail, "stream", d.Stream, "target", d.Target, "held", e.held(d.Stream))
	}
	if n := len(e.since) + len(found) - len(since); n > 0 {
		e.log.Info("drift resolved", "objects", n)
	}
	e.since = since
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
