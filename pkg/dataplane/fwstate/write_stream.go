package fwstate

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ElementsOnly reports whether the rules of a stream are unchanged. The referenced maps then exist
// with the correct size, and only their elements are written.
func ElementsOnly(s plan.StreamWrite) bool {
	if s.Observed == nil || !s.Observed.ChainIntact ||
		s.Observed.Size != s.Desired.Size || s.Observed.Seed != s.Desired.Seed ||
		(s.Observed.Match == nil) != (s.Desired.Match == nil) {
		return false
	}
	for _, family := range vip.Families {
		if len(s.Observed.Tables[family]) != len(s.Desired.Tables[family]) {
			return false
		}
	}
	return true
}

// readStreams reads the objects of the streams whose rules change.
func (w *changeWriter) readStreams(c plan.Change) error {
	for _, s := range c.Streams {
		if ElementsOnly(s) {
			continue
		}
		var err error
		if w.observed[s.Desired.Name], err = w.readStreamObjects(s.Desired.Name); err != nil {
			return err
		}
	}
	return nil
}

// streamSets returns all sets and maps that a stream can have.
func streamSets(stream string) []nft.Set {
	sets := []nft.Set{matchSpec(stream)}
	for _, family := range vip.Families {
		sets = append(sets, maglevSpec(family, stream, 0), liveSpec(family, stream), shadowSpec(family, stream, 0))
	}
	return sets
}

// readStreamObjects reads the chain and rules of a stream, and its sets without elements.
func (f *Conn) readStreamObjects(stream string) (*ruleset, error) {
	return f.readObjects([]string{plan.StreamChain(stream)}, streamSets(stream))
}

// startLive creates missing live maps of streams with Maglev maps.
func (w *changeWriter) startLive(c plan.Change) error {
	for _, s := range c.Streams {
		for _, family := range s.Desired.Families() {
			r, spec := w.observed[s.Desired.Name], liveSpec(family, s.Desired.Name)
			if r == nil {
				continue
			}
			err := w.createLiveMap(family, s.Desired.Name)
			if err = errors.Join(r.checkSet("map", spec), err); err != nil {
				return fmt.Errorf("stream %s: %w", s.Desired.Name, err)
			}
		}
	}
	return nil
}

func (w *changeWriter) streams(c plan.Change) error {
	for _, s := range c.Streams {
		if err := w.stream(s); err != nil {
			return fmt.Errorf("stream %s: %w", s.Desired.Name, err)
		}
	}
	return nil
}

// stream creates or repairs the chain and the maps of one stream.
func (w *changeWriter) stream(s plan.StreamWrite) error {
	want, r := &s.Desired, w.observed[s.Desired.Name]
	if r == nil {
		for _, family := range vip.Families {
			w.fills = append(w.fills, tableEntries{
				set: plan.MaglevMap(family, want.Name), entries: differences(s.Observed.Tables[family], want.Tables[family]),
				known: true,
			})
		}
		changeMatch(w.last, want.Name, s.Observed.Match, want.Match)
		return nil
	}
	chain := nft.Chain{Name: plan.StreamChain(want.Name)}
	if err := r.checkChain(chain); err != nil {
		return err
	}
	if _, ok := r.Chains[chain.Name]; !ok {
		w.first.AddChain(chain)
	}
	deleteRules(w.last, r.Rules[chain.Name])
	if err := w.streamMatch(want, r); err != nil {
		return err
	}
	for _, family := range vip.Families {
		if err := w.streamTable(family, s, r); err != nil {
			return err
		}
		// Remove the shadow map of a resize.
		if shadow := shadowMap(family, want.Name); r.has(shadow) {
			w.last.DeleteSet(shadow)
		}
	}
	w.last.AddRules(chain.Name, w.config.streamRules(want)...)
	return nil
}

// streamTable creates, changes or removes one Maglev map. A map of a different size is replaced
// together with the rules that reference it.
func (w *changeWriter) streamTable(family vip.Family, s plan.StreamWrite, r *ruleset) error {
	table := s.Desired.Tables[family]
	spec := maglevSpec(family, s.Desired.Name, s.Desired.Size)
	if s.Observed != nil && s.Observed.Tables[family] != nil && len(s.Observed.Tables[family]) == len(table) {
		w.fills = append(w.fills, tableEntries{set: spec.Name, entries: differences(s.Observed.Tables[family], table)})
		return nil
	}
	if err := r.checkSet("map", spec); err != nil {
		return err
	}
	referred := false
	if r.has(spec.Name) {
		referred = slices.ContainsFunc(r.Rules[plan.StreamChain(s.Desired.Name)], owned)
		if referred {
			w.last.DeleteSet(spec.Name)
		} else {
			w.first.DeleteSet(spec.Name)
		}
	}
	entries := tableEntries{set: spec.Name, entries: differences(nil, table)}
	switch {
	case table == nil:
	case referred:
		w.last.AddSet(spec)
		fill(w.last, entries)
	default:
		w.first.AddSet(spec)
		w.fills = append(w.fills, entries)
	}
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
