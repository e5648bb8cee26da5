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

// diff compares installed with observed state of the streams where either changed.
func (o *observation) diff() {
	for _, record := range o.streams {
		if !record.stale {
			continue
		}
		record.stale = false
		before, fault := record.drift, record.fault
		o.diffStream(record)
		record.dirty = record.dirty || fault.Broken != record.fault.Broken ||
			fault.ChainMissing != record.fault.ChainMissing ||
			len(plan.Without(before, record.drift, plan.Drift.Key))+len(plan.Without(record.drift, before, plan.Drift.Key)) > 0
	}
	o.noteDrift()
}

func (o *observation) diffStream(record *streamRecord) {
	record.drift, record.fault, record.state = nil, plan.StreamFault{}, nil
	if stream := record.installed; stream != nil && stream.Stage != plan.StageRemoving {
		expected := stream.Kernel(record.targets, &record.tables)
		record.fault = plan.StreamDrift(*stream, expected, o.observed.Streams[stream.Name], o.observed.VIPs)
		// The difference of a pending stream is the work of the next plan, not drift.
		if stream.Stage == plan.StageApplied {
			record.drift = record.fault.Drift
		}
		record.state = o.streamState(stream, record)
	}
	if record.desired == nil && len(record.targets) > 0 || record.desired != nil && record.desired.RouteAll {
		record.state = cmp.Or(record.state, &plan.StreamState{})
		record.state.FWMarks = o.routedFWMarks(record)
	}
	for _, target := range plan.SortedTargets(record.targets) {
		if target.Stage == plan.StageApplied {
			found := plan.TargetDrift(target, o.observed.Targets[target.FWMark], o.lost[target.FWMark])
			record.drift = append(record.drift, found...)
		}
	}
}

// streamState returns the confirmed state of a stream.
func (o *observation) streamState(stream *plan.InstalledStream, record *streamRecord) *plan.StreamState {
	state := &plan.StreamState{Problem: record.fault.Problems}
	kernel := o.observed.Streams[stream.Name]
	for _, f := range vip.Families {
		state.Serving[f] = map[string]struct{}{}
		if !plan.HasFamily(stream.VIPs, f) {
			continue
		}
		if problem := o.observed.Problem; problem != "" {
			state.Problem[f] = cmp.Or(state.Problem[f], "table inet "+plan.TableName+": "+problem)
		}
		if kernel == nil || kernel.Tables[f] == nil {
			continue
		}
		for _, name := range stream.Tables[f] {
			target := record.targets[name]
			forwards := plan.Forwards(target, o.observed.Targets[target.FWMark], f)
			if forwards && o.network.UnreachableReason(target.IPs[f]) == "" {
				state.Serving[f][name] = struct{}{}
			}
		}
		if len(stream.Tables[f]) > 0 && len(state.Serving[f]) == 0 {
			state.Problem[f] = cmp.Or(state.Problem[f],
				"none of the targets in map "+plan.MaglevMap(f, stream.Name)+" can be reached as it is")
		}
	}
	return state
}

// routedFWMarks returns the fwmarks of a stream's targets with installed rules and routes.
func (o *observation) routedFWMarks(record *streamRecord) map[netip.Addr]uint32 {
	marks := make(map[netip.Addr]uint32, len(record.targets))
	for _, target := range record.targets {
		kernel := o.target(target.FWMark)
		for f, hop := range target.IPs {
			if target.Stage != plan.StageRemoving && hop.IsValid() && kernel.Rules[f] && kernel.NextHops[f] == hop {
				marks[hop] = target.FWMark
			}
		}
	}
	return marks
}

// baseDrift returns the drift of the common objects.
func (o *observation) baseDrift() []plan.Drift {
	applied := func(record *streamRecord) bool {
		return record.installed != nil && record.installed.Stage == plan.StageApplied
	}
	switch {
	case o.observed.Base || !o.any(applied): // only an applied stream requires the common objects
		return nil
	case o.observed.Problem != "":
		return []plan.Drift{{Object: "table inet " + plan.TableName, Detail: o.observed.Problem}}
	}
	rules := fmt.Sprintf("policy rules of priority %d and %d", o.priority, o.priority+2)
	return []plan.Drift{{Object: rules, Detail: "one of them is missing or changed"}}
}

// noteDrift records the start of each difference and logs new drift.
func (o *observation) noteDrift() {
	since := map[[3]string]time.Time{}
	var found []plan.Drift
	for _, drift := range o.drift() {
		start, known := o.driftSince[drift.Key()]
		if !known {
			start = o.now()
			found = append(found, drift)
		}
		since[drift.Key()] = start
	}
	if len(found) > 0 {
		first := found[0]
		o.log.Warn("drift detected", "objects", len(found), "first", first.Object, "detail", first.Detail,
			"stream", first.Stream, "target", first.Target, "held", o.holds.held(first.Stream))
	}
	if resolved := len(o.driftSince) + len(found) - len(since); resolved > 0 {
		o.log.Info("drift resolved", "objects", resolved)
	}
	o.driftSince = since
}

// drift lists the differences between installed and observed state, sorted.
func (o *observation) drift() []plan.Drift {
	all := o.baseDrift()
	// Nearly always nothing differs: do not sort the streams then.
	if len(all) == 0 && !o.any(func(record *streamRecord) bool { return len(record.drift) > 0 }) {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(o.streams)) {
		all = append(all, o.streams[name].drift...)
	}
	for i, drift := range all {
		all[i].Since = o.driftSince[drift.Key()]
	}
	return all
}
