package dataplane

import (
	"fmt"
	"maps"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// stream makes and mends one stream's chain and maps.
func (w *writing) stream(s streamWrite) error {
	want, now := &s.want, s.now
	if err := want.check(); err != nil {
		return err
	}
	stands := rulesStand(s)
	referred := false
	if !stands {
		rules, err := w.startStream(want)
		if err != nil {
			return err
		}
		w.last.removeRules(rules)
		referred = slices.ContainsFunc(rules, func(r rule) bool { return r.ours() })
	}
	for _, family := range vip.Families {
		if err := w.streamLive(family, want, stands); err != nil {
			return err
		}
		if err := w.streamTable(family, want, now, referred); err != nil {
			return err
		}
		if err := w.removeSpare(family, want.name, stands); err != nil {
			return err
		}
	}
	if stands {
		return nil
	}
	rules, err := w.streamRules(want)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if err := w.last.addRule(streamChain(want.name), r); err != nil {
			return err
		}
	}
	return nil
}

func (s *streamContent) check() error {
	if s.size == 0 || s.size > maxTable || s.seed == 0 {
		return fmt.Errorf("a table of %d entries with seed %d cannot be", s.size, s.seed)
	}
	for _, table := range s.tables {
		if table != nil && len(table) != int(s.size) {
			return fmt.Errorf("a table of %d entries for the size %d", len(table), s.size)
		}
	}
	return nil
}

// rulesStand tells whether a stream's rules need no change.
func rulesStand(s streamWrite) bool {
	if s.now == nil || !s.now.chain || s.now.size != s.want.size || s.now.seed != s.want.seed {
		return false
	}
	for _, family := range vip.Families {
		if len(s.now.tables[family]) != len(s.want.tables[family]) {
			return false
		}
	}
	return true
}

// startStream makes a stream's chain unless it is there, and returns its rules.
func (w *writing) startStream(want *streamContent) ([]rule, error) {
	name := streamChain(want.name)
	got, err := w.readChain(name)
	if err != nil {
		return nil, err
	}
	if got == nil {
		w.first.addChain(chainSpec{name: name})
		return nil, nil
	}
	if detail := (chainSpec{name: name}).same(*got); detail != "" {
		return nil, &foreignError{object: "chain inet " + TableName + " " + name, detail: detail}
	}
	rules, err := w.readRules(name)
	return rules[name], err
}

// streamTable makes, changes or removes one table. One of another size that rules
// refer to is replaced when they are.
func (w *writing) streamTable(family vip.Family, want, now *streamContent, referred bool) error {
	table := want.tables[family]
	var have []uint32
	if now != nil {
		have = now.tables[family]
	}
	spec := maglevSpec(family, want.name, want.size)
	if have != nil && len(have) == len(table) {
		w.fills = append(w.fills, fill{spec.name, differences(have, table)})
		return nil
	}
	got, err := w.readSet(spec.name)
	if err != nil {
		return err
	}
	at, later := &w.first, false
	if got != nil {
		if detail := spec.same(*got); detail != "" {
			return &foreignError{object: "map inet " + TableName + " " + spec.name, detail: detail}
		}
		if referred {
			at, later = &w.last, true
		}
		at.removeSet(spec.name)
	}
	if table == nil {
		return nil
	}
	at.addSet(spec)
	x := fill{spec.name, differences(nil, table)}
	if later {
		w.last.fill(x)
	} else {
		w.fills = append(w.fills, x)
	}
	return nil
}

// removeSpare removes what is left of a replacement that stepAside began.
func (w *writing) removeSpare(family vip.Family, stream string, stands bool) error {
	if stands {
		return nil
	}
	got, err := w.readSet(spareMap(family, stream))
	if err != nil || got == nil {
		return err
	}
	w.last.removeSet(got.name)
	return nil
}

// startLive makes the maps of live targets of a stream that has tables.
func (w *writing) startLive(s streamWrite) error {
	if rulesStand(s) {
		return nil // they name the maps
	}
	for _, family := range s.want.families() {
		spec := liveSpec(family, s.want.name, s.want.size)
		got, err := w.readSet(spec.name)
		if err != nil {
			return err
		}
		if got != nil {
			if detail := spec.same(*got); detail != "" {
				return &foreignError{object: "map inet " + TableName + " " + spec.name, detail: detail}
			}
		}
		if err := w.makeLive(family, s.want.name, s.want.size); err != nil {
			return err
		}
	}
	return nil
}

// streamLive replaces the map of live targets of a stream whose table has another size
// now.
func (w *writing) streamLive(family vip.Family, want *streamContent, stands bool) error {
	if stands {
		return nil // its rules name the map
	}
	// That of a family without a table stays: its targets say when flows end.
	if want.tables[family] == nil {
		return nil
	}
	name, spec := liveMap(family, want.name), liveSpec(family, want.name, want.size)
	got, err := w.readSet(name)
	if err != nil || got == nil || got.size == spec.size {
		return err
	}
	live, err := w.liveOf(family, want.name)
	if err != nil {
		return err
	}
	w.last.removeSet(name)
	w.last.addSet(spec)
	var list []element
	for _, number := range slices.Sorted(maps.Keys(live)) {
		if live[number] != "" {
			list = append(list, element{key: nativeBytes(number), chain: live[number]})
		}
	}
	w.last.addElements(name, list)
	return nil
}

// differences are the entries that differ between two tables; nil is an empty one.
func differences(have, want []uint32) []entry {
	var list []entry
	for i, number := range want {
		var was uint32
		if have != nil {
			was = have[i]
		}
		if was != number {
			list = append(list, entry{index: uint32(i), number: number, had: was != 0})
		}
	}
	return list
}
