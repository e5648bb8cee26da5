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
func ElementsOnly(write plan.StreamWrite) bool {
	if write.Observed == nil || !write.Observed.ChainIntact ||
		write.Observed.Size != write.Desired.Size || write.Observed.Seed != write.Desired.Seed ||
		(write.Observed.Match == nil) != (write.Desired.Match == nil) {
		return false
	}
	for _, family := range vip.Families {
		if len(write.Observed.Tables[family]) != len(write.Desired.Tables[family]) {
			return false
		}
	}
	return true
}

// readStreams reads the objects of the streams whose rules change.
func (writer *changeWriter) readStreams(change plan.Change) error {
	for _, write := range change.Streams {
		if ElementsOnly(write) {
			continue
		}
		var err error
		if writer.observed[write.Desired.Name], err = writer.readStreamObjects(write.Desired.Name); err != nil {
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
func (conn *Conn) readStreamObjects(stream string) (*ruleset, error) {
	return conn.nft.readObjects([]string{plan.StreamChain(stream)}, streamSets(stream))
}

// startLive creates missing live maps of streams with Maglev maps.
func (writer *changeWriter) startLive(change plan.Change) error {
	for _, write := range change.Streams {
		for _, family := range write.Desired.Families() {
			content, spec := writer.observed[write.Desired.Name], liveSpec(family, write.Desired.Name)
			if content == nil {
				continue
			}
			err := writer.createLiveMap(family, write.Desired.Name)
			if err = errors.Join(content.checkSet("map", spec), err); err != nil {
				return fmt.Errorf("stream %s: %w", write.Desired.Name, err)
			}
		}
		writer.split(&writer.before, &writer.first, 0)
	}
	return nil
}

func (writer *changeWriter) streams(change plan.Change) error {
	for _, write := range change.Streams {
		// One transaction replaces the maps together with the rules, unless resize has removed them.
		entries := len(write.Desired.Tables[vip.IPv4]) + len(write.Desired.Tables[vip.IPv6])
		writer.split(&writer.after, &writer.last, min(entries, MaxElements))
		if err := writer.stream(write); err != nil {
			return fmt.Errorf("stream %s: %w", write.Desired.Name, err)
		}
		writer.split(&writer.before, &writer.first, 0)
	}
	return nil
}

// stream creates or repairs the chain and the maps of one stream.
func (writer *changeWriter) stream(write plan.StreamWrite) error {
	want, content := &write.Desired, writer.observed[write.Desired.Name]
	if content == nil {
		for _, family := range vip.Families {
			writer.fills = append(writer.fills, tableEntries{
				set: plan.MaglevMap(family, want.Name), entries: differences(write.Observed.Tables[family], want.Tables[family]),
				known: true,
			})
		}
		changeMatch(writer.last, want.Name, write.Observed.Match, want.Match)
		return nil
	}
	chain := nft.Chain{Name: plan.StreamChain(want.Name)}
	if err := content.checkChain(chain); err != nil {
		return err
	}
	if _, found := content.Chains[chain.Name]; !found {
		writer.first.AddChain(chain)
	}
	// All rules are replaced: their order matters, and a rule can only be appended.
	deleteRules(writer.last, content.Rules[chain.Name])
	if err := writer.streamMatch(want, content); err != nil {
		return err
	}
	for _, family := range vip.Families {
		if err := writer.streamTable(family, write, content); err != nil {
			return err
		}
		// Remove the shadow map of a resize.
		if shadow := shadowMap(family, want.Name); content.has(shadow) {
			writer.last.DeleteSet(shadow)
		}
	}
	writer.last.AddRules(chain.Name, writer.config.streamRules(want)...)
	return nil
}

// streamTable creates, changes or removes one Maglev map. A map of a different size is replaced
// together with the rules that reference it.
func (writer *changeWriter) streamTable(family vip.Family, write plan.StreamWrite, content *ruleset) error {
	table := write.Desired.Tables[family]
	spec := maglevSpec(family, write.Desired.Name, write.Desired.Size)
	// Of a map of the same size only the differences are written.
	if write.Observed != nil && write.Observed.Tables[family] != nil && len(write.Observed.Tables[family]) == len(table) {
		writer.fills = append(writer.fills, tableEntries{set: spec.Name, entries: differences(write.Observed.Tables[family],
			table)})
		return nil
	}
	if err := content.checkSet("map", spec); err != nil {
		return err
	}
	// A map that rules reference is replaced together with them, in last.
	referred := false
	if content.has(spec.Name) {
		referred = slices.ContainsFunc(content.Rules[plan.StreamChain(write.Desired.Name)], owned)
		if referred {
			writer.last.DeleteSet(spec.Name)
		} else {
			writer.first.DeleteSet(spec.Name)
		}
	}
	entries := tableEntries{set: spec.Name, entries: differences(nil, table)}
	switch {
	case table == nil:
	case referred:
		writer.last.AddSet(spec)
		fill(writer.last, entries)
	default:
		writer.first.AddSet(spec)
		writer.fills = append(writer.fills, entries)
	}
	return nil
}

// differences returns the entries that differ between two tables; nil is an empty table.
func differences(have, want []uint32) []entry {
	var list []entry
	for index, fwmark := range want {
		var was uint32
		if have != nil {
			was = have[index]
		}
		if was != fwmark {
			list = append(list, entry{index: uint32(index), fwmark: fwmark, had: was != 0})
		}
	}
	return list
}
