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
func (f *Conn) resize(c plan.Change) (plan.Change, error) {
	var large []int
	for i, s := range c.Streams {
		if s.Observed == nil || len(s.Observed.Families()) == 0 || !s.Observed.ChainIntact || ElementsOnly(s) {
			continue
		}
		n := 0
		for _, family := range vip.Families {
			if len(s.Observed.Tables[family]) != len(s.Desired.Tables[family]) {
				n += len(s.Desired.Tables[family])
			}
		}
		if n > MaxElements {
			large = append(large, i)
		}
	}
	if len(large) == 0 {
		return c, nil
	}
	// New targets must exist before entries reference them. Removed targets remain until the
	// final write.
	before := plan.Change{Base: c.Base}
	for _, s := range c.Targets {
		if s.Flows != [len(vip.Families)]bool{} {
			before.Targets = append(before.Targets, s)
		}
	}
	if err := f.Write(before); err != nil {
		return c, err
	}
	streams := slices.Clone(c.Streams)
	for _, i := range large {
		if err := f.SwitchToShadow(&streams[i].Desired); err != nil {
			return c, fmt.Errorf("stream %s: %w", streams[i].Desired.Name, err)
		}
		streams[i].Observed = nil
	}
	c.Streams = streams
	return c, nil
}

// SwitchToShadow fills the shadow maps, switches the rules to them, and removes the Maglev maps.
func (f *Conn) SwitchToShadow(want *plan.KernelStream) error {
	r, err := f.readStreamObjects(want.Name)
	if err != nil {
		return err
	}
	start, turn := newTransaction(), newTransaction()
	var fills []tableEntries
	var old []string
	for _, family := range vip.Families {
		spare, live := shadowSpec(family, want.Name, want.Size), liveSpec(family, want.Name)
		if r.has(spare.Name) {
			start.DeleteSet(spare.Name)
		}
		if table := want.Tables[family]; table != nil {
			start.AddSet(spare)
			if !r.has(live.Name) {
				start.AddSet(live)
			}
			fills = append(fills, tableEntries{set: spare.Name, entries: differences(nil, table)})
		}
		if name := plan.MaglevMap(family, want.Name); r.has(name) {
			old = append(old, name)
		}
	}
	createMatch(start, want, r)
	if err := f.commit(start); err != nil {
		return err
	}
	if err := f.writeEntries(fills); err != nil {
		return err
	}
	name := plan.StreamChain(want.Name)
	setRules(turn, name, r.Rules[name], f.config.streamRulesBy(want, shadowMap)...)
	for _, set := range old {
		turn.DeleteSet(set)
	}
	return f.commit(turn)
}
