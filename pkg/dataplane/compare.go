package dataplane

import (
	"cmp"
	"maps"
	"slices"

	"github.com/vipgate/vipgate/pkg/record"
	"github.com/vipgate/vipgate/pkg/vip"
)

// compare compares records and kernel of the streams of which either changed.
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
	s, recorded := e.records.Streams[name]
	if recorded && s.Stage != record.Removing {
		var tables [len(vip.Families)][]uint32
		for _, f := range vip.Families {
			if hasFamily(s.VIPs, f) {
				tables[f] = m.tables[f].of(s.Tables[f], m.targets, s.Size, s.Seed)
			}
		}
		m.fault = streamDrift(s, tables, e.actual.streams[name], e.actual.vips)
		if s.Stage == record.Applied {
			m.drift = m.fault.drift
		}
		m.state = e.streamState(s, m)
	}
	for _, t := range sortedTargets(m.targets) {
		if t.Stage == record.Applied {
			m.drift = append(m.drift, slotDrift(t, e.actual.slots[t.Number], e.lost[t.Number])...)
		}
	}
}

// streamState tells what of a stream is known to be in the kernel.
func (e *engine) streamState(s record.Stream, m *streamMemory) *StreamState {
	x := &StreamState{Problem: m.fault.problems}
	a := e.actual.streams[s.Name]
	for _, f := range vip.Families {
		x.Serving[f] = map[string]struct{}{}
		if !hasFamily(s.VIPs, f) {
			continue
		}
		if !e.actual.base {
			d := baseDrift()
			x.Problem[f] = cmp.Or(x.Problem[f], d.Object+": "+d.Detail)
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

// maxTold is how many things that differ, or no longer do, are logged one by one at
// once: who deletes a whole table makes thousands.
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
			e.log.Warn("somebody else changed the data plane; it stays so until it is reconciled, or something else is wanted there",
				"object", d.Object, "detail", d.Detail, "stream", d.Stream, "target", d.Target)
		}
	}
	for k := range e.since {
		if is[k] {
			continue
		}
		delete(e.since, k)
		if gone++; gone <= maxTold {
			e.log.Info("the data plane is there again as it was recorded", "object", k.object, "stream", k.stream, "target", k.target)
		}
	}
	if come > maxTold {
		e.log.Warn("somebody else changed more of the data plane: lb status lists all", "more", come-maxTold)
	}
	if gone > maxTold {
		e.log.Info("more of the data plane is there again as it was recorded", "more", gone-maxTold)
	}
}

// drift lists what differs from the records, sorted.
func (e *engine) drift() []Drift {
	var all []Drift
	if !e.actual.base && slices.ContainsFunc(slices.Collect(maps.Values(e.records.Streams)), func(s record.Stream) bool { return s.Stage == record.Applied }) {
		all = append(all, baseDrift())
	}
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		all = append(all, e.streams[name].drift...)
	}
	for i, d := range all {
		all[i].Since = e.since[d.key()]
	}
	return all
}
