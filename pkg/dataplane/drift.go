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
func (observed *observation) diff() {
	for _, record := range observed.streams {
		if !record.stale {
			continue
		}
		record.stale = false
		before, fault := record.drift, record.fault
		observed.diffStream(record)
		record.dirty = record.dirty || fault.Broken != record.fault.Broken ||
			fault.ChainMissing != record.fault.ChainMissing ||
			len(plan.Without(before, record.drift, plan.Drift.Key))+len(plan.Without(record.drift, before, plan.Drift.Key)) > 0
	}
	observed.noteDrift()
}

func (observed *observation) diffStream(record *streamRecord) {
	record.drift, record.fault, record.state = nil, plan.StreamFault{}, nil
	if stream := record.installed; stream != nil && stream.Stage != plan.StageRemoving {
		expected := stream.Kernel(record.targets, &record.tables)
		record.fault = plan.StreamDrift(*stream, expected, observed.observed.Streams[stream.Name], observed.observed.VIPs)
		// The difference of a pending stream is the work of the next plan, not drift.
		if stream.Stage == plan.StageApplied {
			record.drift = record.fault.Drift
		}
		record.state = observed.streamState(stream, record)
	}
	// Health checks use fwmarks of an earlier process before the first desired state.
	if record.desired == nil && len(record.targets) > 0 || record.desired != nil && record.desired.RouteAll {
		record.state = cmp.Or(record.state, &plan.StreamState{})
		record.state.FWMarks = observed.routedFWMarks(record)
	}
	for _, target := range plan.SortedTargets(record.targets) {
		if target.Stage == plan.StageApplied {
			found := plan.TargetDrift(target, observed.observed.Targets[target.FWMark], observed.lost[target.FWMark])
			record.drift = append(record.drift, found...)
		}
	}
}

// streamState returns the confirmed state of a stream.
func (observed *observation) streamState(stream *plan.InstalledStream, record *streamRecord) *plan.StreamState {
	state := &plan.StreamState{Problem: record.fault.Problems}
	kernel := observed.observed.Streams[stream.Name]
	for _, family := range vip.Families {
		state.Serving[family] = map[string]struct{}{}
		if !plan.HasFamily(stream.VIPs, family) && stream.Tables[family] == nil {
			continue
		}
		if problem := observed.observed.Problem; problem != "" {
			state.Problem[family] = cmp.Or(state.Problem[family], "table inet "+plan.TableName+": "+problem)
		}
		if kernel == nil || kernel.Tables[family] == nil {
			continue
		}
		for _, name := range stream.Tables[family] {
			target := record.targets[name]
			forwards := plan.Forwards(target, observed.observed.Targets[target.FWMark], family)
			if forwards && observed.network.UnreachableReason(target.IPs[family]) == "" {
				state.Serving[family][name] = struct{}{}
			}
		}
		// An empty table is the desired state of a stream without serving targets, not a problem.
		if len(stream.Tables[family]) > 0 && len(state.Serving[family]) == 0 {
			state.Problem[family] = cmp.Or(state.Problem[family],
				"none of the targets in map "+plan.MaglevMap(family, stream.Name)+" can be reached as it is")
		}
	}
	return state
}

// routedFWMarks returns the fwmarks of a stream's targets with installed rules and routes.
func (observed *observation) routedFWMarks(record *streamRecord) map[netip.Addr]uint32 {
	marks := make(map[netip.Addr]uint32, len(record.targets))
	for _, target := range record.targets {
		kernel := observed.target(target.FWMark)
		for f, hop := range target.IPs {
			if target.Stage != plan.StageRemoving && hop.IsValid() && kernel.Rules[f] && kernel.NextHops[f] == hop {
				marks[hop] = target.FWMark
			}
		}
	}
	return marks
}

// baseDrift returns the drift of the common objects.
func (observed *observation) baseDrift() []plan.Drift {
	applied := func(record *streamRecord) bool {
		return record.installed != nil && record.installed.Stage == plan.StageApplied
	}
	switch kernel := observed.observed; {
	case kernel.Base && kernel.Checks || !observed.any(applied): // only an applied stream requires the common objects
		return nil
	case kernel.Problem != "":
		return []plan.Drift{{Object: "table inet " + plan.TableName, Detail: kernel.Problem}}
	case kernel.Base:
		return []plan.Drift{{Object: "chain inet " + plan.TableName + " checks", Detail: "it is missing or changed"}}
	}
	rules := fmt.Sprintf("policy rules of priority %d and %d", observed.priority, observed.priority+2)
	return []plan.Drift{{Object: rules, Detail: "one of them is missing or changed"}}
}

// noteDrift records the start of each difference and logs new drift.
func (observed *observation) noteDrift() {
	since := map[[3]string]time.Time{}
	var found []plan.Drift
	for _, drift := range observed.drift() {
		start, known := observed.driftSince[drift.Key()]
		if !known {
			start = observed.now()
			found = append(found, drift)
		}
		since[drift.Key()] = start
	}
	if len(found) > 0 {
		first := found[0]
		observed.log.Warn("drift detected", "objects", len(found), "first", first.Object, "detail", first.Detail,
			"stream", first.Stream, "target", first.Target, "held", observed.holds.held(first.Stream))
	}
	if resolved := len(observed.driftSince) + len(found) - len(since); resolved > 0 {
		observed.log.Info("drift resolved", "objects", resolved)
	}
	observed.driftSince = since
}

// drift lists the differences between installed and observed state, sorted.
func (observed *observation) drift() []plan.Drift {
	all := observed.baseDrift()
	// Nearly always nothing differs: do not sort the streams then.
	if len(all) == 0 && !observed.any(func(record *streamRecord) bool { return len(record.drift) > 0 }) {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(observed.streams)) {
		all = append(all, observed.streams[name].drift...)
	}
	for i, drift := range all {
		all[i].Since = observed.driftSince[drift.Key()]
	}
	return all
}
