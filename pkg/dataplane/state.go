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
func (engine *engine) deadlines() (list []time.Time) {
	for _, end := range engine.holds.until {
		if !end.IsZero() {
			list = append(list, end)
		}
	}
	if engine.desired == nil || engine.observed == nil {
		return list
	}
	if repair := engine.repairs.byObject[movedDrift.Key()]; repair != nil && engine.rulesetRead {
		list = append(list, repair.next)
	}
	list = slices.AppendSeq(list, maps.Values(engine.draining))
	list = slices.AppendSeq(list, maps.Values(engine.guests))
	for _, drift := range engine.drift() {
		if repair := engine.repairs.byObject[drift.Key()]; repair != nil && !engine.holds.held(drift.Stream) {
			list = append(list, repair.next)
		}
	}
	return list
}

// describe adds the confirmed state of streams and VIPs to state.
func (engine *engine) describe(state *plan.State) {
	for _, name := range slices.Sorted(maps.Keys(engine.streams)) {
		record := engine.streams[name]
		if record.state != nil {
			state.Streams[name] = record.state
		}
		maps.Copy(state.Unreachable, record.unreachableIn(engine.network))
		state.Problems = append(state.Problems, record.problems...)
		stream := record.installed
		// Without base chains or the stream's chain its elements forward nothing.
		if stream == nil || stream.Stage == plan.StageRemoving || engine.observed.Problem != "" || record.fault.ChainMissing {
			continue
		}
		for _, v := range stream.VIPs {
			if engine.observed.VIPs[v] == name {
				state.VIPs[v] = name
			}
		}
	}
	// A covered VIP has no element: its packets match the element of the wider VIP.
	for narrow, wide := range engine.vipOwners.Covered {
		if name, ok := state.VIPs[wide]; ok {
			state.VIPs[narrow] = name
		}
	}
	state.Drift = engine.drift()
	state.Problems = append(state.Problems, engine.vipOwners.Problems...)
	for _, fwmark := range slices.Sorted(maps.Keys(engine.fwmarks.refused)) {
		state.Problems = append(state.Problems, Problem{
			Object: fmt.Sprintf("fwmark %d", fwmark), Detail: "another process uses it: " + engine.fwmarks.refused[fwmark],
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
	// Packets and Bytes count the traffic to the target since its chain was created, by the fast path
	// since the start of the process.
	Packets, Bytes uint64
}

func (engine *engine) listTargets() ([]TargetView, error) {
	if engine.observed == nil {
		return nil, errors.New("the kernel could not be read yet")
	}
	kernel, err := engine.kernel.ReadTargets(engine.installedFWMarks())
	if err != nil {
		return nil, fmt.Errorf("read the counters of targets: %w", err)
	}
	fast, err := engine.fast.counters()
	if err != nil {
		return nil, err
	}
	// Count the entries in the kernel instead of the planned ones, to show drift.
	entries := map[uint32][len(vip.Families)]int{}
	for _, stream := range engine.observed.Streams {
		for f, table := range stream.Tables {
			for _, fwmark := range table {
				count := entries[fwmark]
				count[f]++
				entries[fwmark] = count
			}
		}
	}
	var list []TargetView
	for _, record := range engine.streams {
		for _, target := range record.targets {
			// A packet passes one of the two.
			counters, before := orNone(kernel[target.FWMark]), fast[target.FWMark]
			list = append(list, TargetView{
				target, record.stateOf(target), entries[target.FWMark],
				counters.Packets + before.Packets, counters.Bytes + before.Bytes,
			})
		}
	}
	slices.SortFunc(list, func(a, b TargetView) int {
		return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Name, b.Name))
	})
	return list, nil
}

// unmatched returns the number of packets dropped by the match of each stream.
func (engine *engine) unmatched() (map[string]uint64, error) {
	var streams []string
	for name, record := range engine.streams {
		if record.installed != nil && record.installed.Match != nil {
			streams = append(streams, name)
		}
	}
	dropped, err := engine.kernel.ReadUnmatched(streams)
	if err != nil {
		return nil, fmt.Errorf("read the counters of matches: %w", err)
	}
	return dropped, nil
}

func (record *streamRecord) stateOf(target plan.InstalledTarget) string {
	serves := func(names map[string]struct{}) bool {
		_, ok := names[target.Name]
		return ok
	}
	switch {
	case target.Stage == plan.StageRemoving:
		return "removing"
	case slices.ContainsFunc(record.drift, func(drift plan.Drift) bool { return drift.Target == target.Name }):
		return "drifted"
	case record.state != nil && slices.ContainsFunc(record.state.Serving[:], serves):
		return "serving"
	case target.Stage == plan.StagePending:
		return "pending"
	case target.Flows != [len(vip.Families)]bool{}:
		return "draining"
	}
	return "down"
}
