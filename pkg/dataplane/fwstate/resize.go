package fwstate

import (
	"fmt"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// resize prepares Maglev maps that change their size and are too large for one transaction.
// The name of a map is fixed, so the old and the new map cannot coexist. resize fills a shadow
// map, which the rules use while the map itself is rebuilt. It returns such streams as streams
// without maps.
func (conn *Conn) resize(change plan.Change) (plan.Change, error) {
	var large []int
	for index, write := range change.Streams {
		// Only a stream that forwards packets with its maps needs shadow maps.
		if write.Observed == nil || len(write.Observed.Families()) == 0 || !write.Observed.ChainIntact ||
			ElementsOnly(write) {
			continue
		}
		elements := 0
		for _, family := range vip.Families {
			if len(write.Observed.Tables[family]) != len(write.Desired.Tables[family]) {
				elements += len(write.Desired.Tables[family])
			}
		}
		// Smaller maps change their size within the transaction of Write.
		if elements > MaxElements {
			large = append(large, index)
		}
	}
	if len(large) == 0 {
		return change, nil
	}
	// New targets must exist before entries reference them. Removed ones remain until the final write.
	before := plan.Change{Base: change.Base}
	for _, write := range change.Targets {
		if write.Flows != [len(vip.Families)]bool{} {
			before.Targets = append(before.Targets, write)
		}
	}
	if err := conn.Write(before); err != nil {
		return change, err
	}
	// The slice belongs to the caller.
	streams := slices.Clone(change.Streams)
	for _, index := range large {
		if err := conn.SwitchToShadow(&streams[index].Desired); err != nil {
			return change, fmt.Errorf("stream %s: %w", streams[index].Desired.Name, err)
		}
		// The maps are removed now, so Write creates them as for a new stream.
		streams[index].Observed = nil
	}
	change.Streams = streams
	return change, nil
}

// SwitchToShadow fills the shadow maps, switches the rules to them, and removes the Maglev maps.
func (conn *Conn) SwitchToShadow(want *plan.KernelStream) error {
	content, err := conn.readStreamObjects(want.Name)
	if err != nil {
		return err
	}
	start, turn := newTransaction(), newTransaction()
	// The shadow map exists before the rules reference it; the old map is removed after them.
	var fills []tableEntries
	var old []string
	for _, family := range vip.Families {
		spare, live := shadowSpec(family, want.Name, want.Size), liveSpec(family, want.Name)
		// A shadow map remains after an interrupted resize.
		if content.has(spare.Name) {
			start.DeleteSet(spare.Name)
		}
		if table := want.Tables[family]; table != nil {
			start.AddSet(spare)
			if !content.has(live.Name) {
				start.AddSet(live)
			}
			fills = append(fills, tableEntries{set: spare.Name, entries: differences(nil, table)})
		}
		if name := plan.MaglevMap(family, want.Name); content.has(name) {
			old = append(old, name)
		}
	}
	createMatch(start, want, content)
	if err := conn.commit(start); err != nil {
		return err
	}
	// Until all entries exist, packets use the old map.
	if err := conn.writeEntries(fills); err != nil {
		return err
	}
	name := plan.StreamChain(want.Name)
	setRules(turn, name, content.Rules[name], conn.config.streamRulesBy(want, shadowMap)...)
	for _, set := range old {
		turn.DeleteSet(set)
	}
	return conn.commit(turn)
}
