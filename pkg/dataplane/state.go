package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// deadlines returns the end times of holds, drains and repair back-offs.
func (e *engine) deadlines() (list []time.Time) {
	for _, end := range e.holds.until {
		if !end.IsZero() {
			list = append(list, end)
		}
	}
	if e.desired == nil || e.observed == nil {
		return list
	}
	list = slices.AppendSeq(list, maps.Values(e.draining))
	for _, drift := range e.drift() {
		if repair := e.repairs.byObject[drift.Key()]; repair != nil && !e.holds.held(drift.Stream) {
			list = append(list, repair.next)
		}
	}
	return list
}

// describe adds the confirmed state of streams and VIPs to state.
func (e *engine) describe(state *plan.State) {
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		record := e.streams[name]
		if record.state != nil {
			state.Streams[name] = record.state
		}
		maps.Copy(state.Unreachable, record.unreachableIn(e.network))
		state.Problems = append(state.Problems, record.problems...)
		stream := record.installed
		// Without base chains or the stream's chain its elements forward nothing.
		if stream == nil || stream.Stage == plan.StageRemoving || e.observed.Problem != "" || record.fault.ChainMissing {
			continue
		}
		for _, v := range stream.VIPs {
			if e.observed.VIPs[v] == name {
				state.VIPs[v] = name
			}
		}
	}
	for narrow, wide := range e.vipOwners.Covered {
		if name, ok := state.VIPs[wide]; ok {
			state.VIPs[narrow] = name
		}
	}
	state.Drift = e.drift()
	state.Problems = append(state.Problems, e.vipOwners.Problems...)
	for _, fwmark := range slices.Sorted(maps.Keys(e.fwmarks.refused)) {
		state.Problems = append(state.Problems, Problem{
			Object: fmt.Sprintf("fwmark %d", fwmark), Detail: "another process uses it: " + e.fwmarks.refused[fwmark],
			Remedy: "no action required: a different fwmark is assigned",
		})
	}
}

// TargetView describes one target in the kernel for operators.
type TargetView struct {
	plan.InstalledTarget
	// State is one of serving, draining, down, pending, removing, drifted.
	State string
	// Entries counts the target's Maglev map entries, by family.
	Entries [len(vip.Families)]int
	// Packets and Bytes count the traffic to the target since its chain was created.
	Packets, Bytes uint64
}

// listTargets lists the targets for operators.
func (e *engine) listTargets() ([]TargetView, error) {
	if e.observed == nil {
		return nil, errors.New("the kernel could not be read yet")
	}
	kernel, err := e.kernel.ReadTargets(e.installedFWMarks())
	if err != nil {
		return nil, fmt.Errorf("read the counters of targets: %w", err)
	}
	entries := map[uint32][len(vip.Families)]int{}
	for _, stream := range e.observed.Streams {
		for f, table := range stream.Tables {
			for _, fwmark := range table {
				count := entries[fwmark]
				count[f]++
				entries[fwmark] = count
			}
		}
	}
	var list []TargetView
	for _, record := range e.streams {
		for _, target := range record.targets {
			counters := orNone(kernel[target.FWMark])
			list = append(list, TargetView{
				target, record.stateOf(target), entries[target.FWMark], counters.Packets, counters.Bytes,
			})
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
	for name, record := range e.streams {
		if record.installed != nil && record.installed.Match != nil {
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
func (r *streamRecord) stateOf(target plan.InstalledTarget) string {
	serves := func(names map[string]struct{}) bool {
		_, ok := names[target.Name]
		return ok
	}
	switch {
	case target.Stage == plan.StageRemoving:
		return "removing"
	case slices.ContainsFunc(r.drift, func(drift plan.Drift) bool { return drift.Target == target.Name }):
		return "drifted"
	case r.state != nil && slices.ContainsFunc(r.state.Serving[:], serves):
		return "serving"
	case target.Stage == plan.StagePending:
		return "pending"
	case target.Flows != [len(vip.Families)]bool{}:
		return "draining"
	}
	return "down"
}
