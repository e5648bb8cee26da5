package dataplane

import (
	"fmt"

	"github.com/vipgate/vipgate/pkg/vip"
)

// stepAside prepares for tables that change their size and are too large for one
// transaction. The name of a table is fixed, so that it cannot be filled beside the
// one that is in use: a spare one with another name is filled first, and the rules
// look there while the table itself is made anew. Streams that were treated so come
// back as ones that have no tables yet.
func (f *fabric) stepAside(c change) (change, error) {
	var large []int
	for i, s := range c.streams {
		if s.now == nil || !s.now.chain || rulesStand(s) || s.want.check() != nil {
			continue
		}
		n := 0
		for _, family := range vip.Families {
			if len(s.now.tables[family]) != len(s.want.tables[family]) {
				n += len(s.want.tables[family])
			}
		}
		if n > maxElements {
			large = append(large, i)
		}
	}
	if len(large) == 0 {
		return c, nil
	}
	// New targets must be there before entries lead to them; others stay for now.
	before := change{base: c.base}
	for _, s := range c.slots {
		if s.flows != [len(vip.Families)]bool{} {
			before.slots = append(before.slots, s)
		}
	}
	if err := f.write(before); err != nil {
		return c, err
	}
	streams := append([]streamWrite(nil), c.streams...)
	for _, i := range large {
		if err := f.toSpare(&streams[i].want); err != nil {
			return c, fmt.Errorf("stream %s: %w", streams[i].want.name, err)
		}
		streams[i].now = nil
	}
	c.streams = streams
	return c, nil
}

// toSpare has a stream's rules look in spare tables, and removes its own.
func (f *fabric) toSpare(want *streamContent) error {
	var start, turn transaction
	var fills []fill
	var old []string
	for _, family := range vip.Families {
		spare := spareSpec(family, want.name, want.size)
		if got, err := f.readSet(spare.name); err != nil {
			return err
		} else if got != nil {
			start.removeSet(spare.name)
		}
		if table := want.tables[family]; table != nil {
			start.addSet(spare)
			if live, err := f.readSet(liveMap(family, want.name)); err != nil {
				return err
			} else if live == nil {
				start.addSet(liveSpec(family, want.name, want.size))
			}
			fills = append(fills, fill{spare.name, differences(nil, table)})
		}
		if got, err := f.readSet(maglevMap(family, want.name)); err != nil {
			return err
		} else if got != nil {
			old = append(old, got.name)
		}
	}
	if err := f.commit(&start, nil); err != nil {
		return err
	}
	if err := f.fillUp(fills); err != nil {
		return err
	}
	name := streamChain(want.name)
	have, err := f.readRules(name)
	if err != nil {
		return err
	}
	rules, err := f.streamRulesBy(want, spareMap)
	if err != nil {
		return err
	}
	if err := turn.setRules(name, have[name], rules); err != nil {
		return err
	}
	for _, set := range old {
		turn.removeSet(set)
	}
	return f.commit(&turn, nil)
}
