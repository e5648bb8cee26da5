package midstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxTargets limits the targets of a family, because one transaction writes their elements.
const maxTargets = fwstate.MaxElements / 3

// Streams holds the streams by family, sorted by name.
type Streams [len(vip.Families)][]Stream

// Empty reports whether no family has a stream.
func (streams *Streams) Empty() bool { return len(streams[vip.IPv4])+len(streams[vip.IPv6]) == 0 }

// Apply gives both tables the content for streams and reads it back; a table without streams is
// removed. It returns the first difference that it found before, "" for none. known is the content
// of the last call if no other process changed nftables since, otherwise empty: maps of slots are
// read only of other streams.
func Apply(conn *nft.Conn, mask uint32, streams, known Streams) (difference string, err error) {
	for _, family := range vip.Families {
		some := limited(streams[family])
		if len(some) == 0 {
			removed, err := remove(conn, family)
			if err != nil {
				return "", err
			}
			if removed && difference == "" {
				difference = "table without streams"
			}
			continue
		}
		table := nft.Table{Family: tableFamily[family], Name: plan.TableName}
		writer, found := slotWriter{conn: conn, transaction: nft.Transaction{Table: table}}, ""
		if before := limited(known[family]); len(before) > 0 && sameObjects(before, some) {
			err = writer.writeTargets(newBuilder(family, mask), before, some)
		} else {
			// Objects come or go, or another process may have changed the table.
			found, _, err = conn.Ensure(tableOf(family, mask, some))
		}
		if err != nil {
			return "", err
		}
		for _, stream := range some {
			if stream.asksEveryone() {
				continue
			}
			index := slices.IndexFunc(known[family], func(before Stream) bool {
				return before.Name == stream.Name && before.Size == stream.Size && !before.asksEveryone()
			})
			for order, asked := range stream.Asked {
				set, have := askedPrefixes[order]+stream.Name, map[uint32]netip.Addr(nil)
				if index >= 0 {
					have = known[family][index].Asked[order]
				} else if have, err = readSlots(conn, table, set); err != nil {
					return "", err
				}
				changed, err := writer.write(set, have, asked)
				if err != nil {
					return "", err
				}
				if changed && found == "" {
					found = "elements of map " + table.String() + " " + set
				}
			}
		}
		if err := writer.commit(); err != nil {
			return "", err
		}
		if difference == "" {
			difference = found
		}
	}
	return difference, nil
}

// sameObjects reports whether the tables of two lists of streams differ in elements of sets
// and in the rules for each target only.
func sameObjects(before, after []Stream) bool {
	return slices.EqualFunc(before, after, func(a, b Stream) bool {
		return a.Name == b.Name && a.Size == b.Size && a.Seed == b.Seed && a.asksEveryone() == b.asksEveryone()
	})
}

// writeTargets adds the differences of the elements of targets.
func (writer *slotWriter) writeTargets(b *builder, before, after []Stream) error {
	// Elements of other streams are equal: fwmarks belong to one stream. Link-layer addresses do not.
	changed := func(streams, than []Stream) (list []Stream) {
		for _, stream := range streams {
			if !slices.ContainsFunc(than, func(other Stream) bool { return stream.sameTargets(other) }) {
				list = append(list, stream)
			}
		}
		return list
	}
	sets := func(streams, than []Stream) []nft.Set {
		differing := changed(streams, than)
		list := append(b.targetSets(differing), linksOf(streams))
		for _, stream := range differing {
			list = append(list, linkSet(stream))
		}
		return list
	}
	had := map[string][]nft.Element{}
	for _, set := range sets(before, after) {
		had[set.Name] = set.Elements
	}
	for _, set := range sets(after, before) {
		if err := writer.writeElements(set.Name, had[set.Name], set.Elements); err != nil {
			return err
		}
	}
	for _, stream := range changed(after, before) {
		if stream.asksEveryone() {
			for _, chain := range b.peerChains(stream) {
				writer.transaction.FlushChain(chain.Name)
				writer.transaction.AddRules(chain.Name, chain.Rules...)
			}
		}
	}
	return nil
}

// sameTargets reports whether two streams have the same elements of targets.
func (stream *Stream) sameTargets(other Stream) bool {
	return stream.Name == other.Name && maps.Equal(stream.FWMarks, other.FWMarks) &&
		maps.Equal(stream.Everyone, other.Everyone)
}

// limited returns the first streams that have maxTargets targets together.
func limited(streams []Stream) []Stream {
	targets := 0
	for i, stream := range streams {
		if targets += len(stream.FWMarks); targets > maxTargets {
			return streams[:i]
		}
	}
	return streams
}

// Remove removes both tables.
func Remove(conn *nft.Conn) error {
	_, err := Apply(conn, 0, Streams{}, Streams{})
	return err
}

func remove(conn *nft.Conn, family vip.Family) (removed bool, err error) {
	table := nft.Table{Family: tableFamily[family], Name: plan.TableName}
	flags, err := conn.Flags(table)
	if err != nil || flags == nil {
		return false, err
	}
	transaction := &nft.Transaction{Table: table}
	transaction.DeleteTable()
	if err := conn.Commit(transaction, nil); err != nil && !errors.Is(err, unix.ENOENT) {
		return false, err
	}
	return true, nil
}

// readSlots reads a map of slots.
func readSlots(conn *nft.Conn, table nft.Table, set string) (map[uint32]netip.Addr, error) {
	have := map[uint32]netip.Addr{}
	if _, err := conn.Elements(table, set, func(element nft.Element) {
		if address, ok := netip.AddrFromSlice(element.Data); ok && len(element.Key) == 4 {
			have[binary.NativeEndian.Uint32(element.Key)] = address
		}
	}); err != nil {
		return nil, fmt.Errorf("failed to read map %s %s: %w", table, set, err)
	}
	return have, nil
}

// slotWriter writes the differences of maps of slots. Each element is valid without the rest, so a
// large change takes several transactions.
type slotWriter struct {
	conn        *nft.Conn
	transaction nft.Transaction
	elements    int
}

// write adds the differences of one map of slots, and reports whether there are any.
func (writer *slotWriter) write(set string, have, want map[uint32]netip.Addr) (changed bool, err error) {
	// Most streams did not change, and their owner passes the same map again.
	if reflect.ValueOf(have).UnsafePointer() == reflect.ValueOf(want).UnsafePointer() {
		return false, nil
	}
	var removed, added []nft.Element
	for slot, address := range have {
		if want[slot] != address {
			removed = append(removed, nft.Element{Key: number(slot)})
		}
	}
	for slot, address := range want {
		if have[slot] != address {
			added = append(added, nft.Element{Key: number(slot), Data: address.AsSlice()})
		}
	}
	return len(removed)+len(added) > 0, writer.change(set, removed, added)
}

// writeElements adds the differences of one set.
func (writer *slotWriter) writeElements(set string, have, want []nft.Element) error {
	text := func(element nft.Element) string {
		return string(element.Key) + "/" + string(element.Data) + "/" + element.Chain
	}
	missing := func(list, than []nft.Element) (missing []nft.Element) {
		known := map[string]bool{}
		for _, element := range than {
			known[text(element)] = true
		}
		for _, element := range list {
			if !known[text(element)] {
				missing = append(missing, element)
			}
		}
		return missing
	}
	removed := missing(have, want)
	for i := range removed {
		removed[i] = nft.Element{Key: removed[i].Key}
	}
	return writer.change(set, removed, missing(want, have))
}

// change adds a change of a set. An element that changes is deleted before it is added.
func (writer *slotWriter) change(set string, removed, added []nft.Element) error {
	for part := range slices.Chunk(removed, fwstate.MaxElements) {
		if err := writer.reserve(len(part)); err != nil {
			return err
		}
		writer.transaction.DeleteElements(set, part)
	}
	for part := range slices.Chunk(added, fwstate.MaxElements) {
		if err := writer.reserve(len(part)); err != nil {
			return err
		}
		writer.transaction.AddElements(set, part)
	}
	return nil
}

// reserve commits the transaction unless it has room for more elements.
func (writer *slotWriter) reserve(elements int) error {
	if writer.elements += elements; writer.elements <= fwstate.MaxElements {
		return nil
	}
	err := writer.commit()
	writer.elements = elements
	return err
}

func (writer *slotWriter) commit() error {
	err := writer.conn.Commit(&writer.transaction, nil)
	writer.transaction, writer.elements = nft.Transaction{Table: writer.transaction.Table}, 0
	return err
}

// Counters counts packets since the tables were last written.
type Counters struct {
	// Asked counts copies to earlier targets, Full packets that were not copied because too many flows
	// are undecided.
	Asked, Full uint64
	// Current counts flows that the current target has, Decided flows of another target, Denied flows
	// that all targets denied.
	Current, Decided, Denied uint64
}

// Read returns the sum of the counters of both tables.
func Read(conn *nft.Conn) (counters Counters, err error) {
	by := map[string]*uint64{
		commentAsked: &counters.Asked, commentFull: &counters.Full, commentDecided: &counters.Decided,
		commentDenied: &counters.Denied, commentCurrent: &counters.Current, commentOverAskRate: &counters.Full,
	}
	for _, family := range vip.Families {
		table := nft.Table{Family: tableFamily[family], Name: plan.TableName}
		rules, err := conn.Rules(table, "")
		if err != nil {
			return counters, err
		}
		for _, list := range rules {
			for _, rule := range list {
				if counter := by[rule.Comment]; counter != nil {
					*counter += rule.Packets
				}
			}
		}
	}
	return counters, nil
}
