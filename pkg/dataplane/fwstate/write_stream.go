package fwstate

import (
	"maps"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// stream creates and repairs the chain and the maps of one stream.
func (w *changeWriter) stream(s plan.StreamWrite) error {
	want, now := &s.Desired, s.Observed
	if err := want.Validate(); err != nil {
		return err
	}
	unchanged := rulesUnchanged(s)
	referred := false
	if !unchanged {
		rules, err := w.startStream(want)
		if err != nil {
			return err
		}
		w.last.removeRules(rules)
		referred = slices.ContainsFunc(rules, func(r rule) bool { return r.owned() })
	}
	for _, family := range vip.Families {
		if err := w.streamLive(family, want, unchanged); err != nil {
			return err
		}
		if err := w.streamTable(family, want, now, referred); err != nil {
			return err
		}
		if err := w.removeShadow(family, want.Name, unchanged); err != nil {
			return err
		}
	}
	if !unchanged {
		w.last.addRules(plan.StreamChain(want.Name), w.streamRules(want)...)
	}
	return nil
}

// rulesUnchanged reports whether the rules of a stream need no change.
func rulesUnchanged(s plan.StreamWrite) bool {
	if s.Observed == nil || !s.Observed.ChainIntact ||
		s.Observed.Size != s.Desired.Size || s.Observed.Seed != s.Desired.Seed {
		return false
	}
	for _, family := range vip.Families {
		if len(s.Observed.Tables[family]) != len(s.Desired.Tables[family]) {
			return false
		}
	}
	return true
}

// startStream creates the chain of a stream if it is missing, and returns its rules.
func (w *changeWriter) startStream(want *plan.KernelStream) ([]rule, error) {
	name := plan.StreamChain(want.Name)
	got, err := w.readChain(name)
	if err != nil {
		return nil, err
	}
	if got == nil {
		w.first.addChain(chainSpec{name: name})
		return nil, nil
	}
	if err := conflict("chain", name, chainSpec{name: name}.mismatch(*got)); err != nil {
		return nil, err
	}
	rules, err := w.readRules(name)
	return rules[name], err
}

// streamTable creates, changes or removes one Maglev map. A map of another size that rules
// refer to is replaced together with them.
func (w *changeWriter) streamTable(family vip.Family, want, now *plan.KernelStream, referred bool) error {
	table := want.Tables[family]
	var have []uint32
	if now != nil {
		have = now.Tables[family]
	}
	spec := maglevSpec(family, want.Name, want.Size)
	if have != nil && len(have) == len(table) {
		w.fills = append(w.fills, tableEntries{spec.name, differences(have, table)})
		return nil
	}
	got, err := w.readSet(spec.name)
	if err != nil {
		return err
	}
	at := &w.first
	if got != nil {
		if err := conflict("map", spec.name, spec.mismatch(*got)); err != nil {
			return err
		}
		if referred {
			at = &w.last
		}
		at.removeSet(spec.name)
	}
	if table == nil {
		return nil
	}
	at.addSet(spec)
	x := tableEntries{spec.name, differences(nil, table)}
	if at == &w.last {
		w.last.fill(x)
	} else {
		w.fills = append(w.fills, x)
	}
	return nil
}

// removeShadow removes the shadow map that resize left.
func (w *changeWriter) removeShadow(family vip.Family, stream string, unchanged bool) error {
	if unchanged {
		return nil
	}
	got, err := w.readSet(shadowMap(family, stream))
	if err != nil || got == nil {
		return err
	}
	w.last.removeSet(got.name)
	return nil
}

// startLive creates the live maps of a stream with Maglev maps.
func (w *changeWriter) startLive(s plan.StreamWrite) error {
	if rulesUnchanged(s) {
		return nil // the rules refer to the maps
	}
	for _, family := range s.Desired.Families() {
		spec := liveSpec(family, s.Desired.Name, s.Desired.Size)
		got, err := w.readSet(spec.name)
		if err != nil {
			return err
		}
		if got != nil {
			if err := conflict("map", spec.name, spec.mismatch(*got)); err != nil {
				return err
			}
		}
		if err := w.createLiveMap(family, s.Desired.Name, s.Desired.Size); err != nil {
			return err
		}
	}
	return nil
}

// streamLive replaces the live map of a stream whose Maglev map changes its size.
func (w *changeWriter) streamLive(family vip.Family, want *plan.KernelStream, unchanged bool) error {
	// Unchanged rules refer to the map. That of a family without a Maglev map stays: its targets
	// end their flows.
	if unchanged || want.Tables[family] == nil {
		return nil
	}
	name, spec := plan.LiveMap(family, want.Name), liveSpec(family, want.Name, want.Size)
	got, err := w.readSet(name)
	if err != nil || got == nil || got.size == spec.size {
		return err
	}
	live, err := w.liveOf(family, want.Name)
	if err != nil {
		return err
	}
	w.last.removeSet(name)
	w.last.addSet(spec)
	var list []element
	for _, fwmark := range slices.Sorted(maps.Keys(live)) {
		if live[fwmark] != "" {
			list = append(list, element{key: markKey(fwmark), chain: live[fwmark]})
		}
	}
	w.last.addElements(name, list)
	return nil
}

// differences returns the entries that differ between two tables; nil is an empty table.
func differences(have, want []uint32) []entry {
	var list []entry
	for i, fwmark := range want {
		var was uint32
		if have != nil {
			was = have[i]
		}
		if was != fwmark {
			list = append(list, entry{index: uint32(i), fwmark: fwmark, had: was != 0})
		}
	}
	return list
}
