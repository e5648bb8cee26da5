package midstream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
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
		table := tableOf(family, mask, some)
		found, _, err := conn.Ensure(table)
		if err != nil {
			return "", err
		}
		writer := slotWriter{conn: conn, transaction: nft.Transaction{Table: table}}
		for _, stream := range some {
			index := slices.IndexFunc(known[family], func(before Stream) bool {
				return before.Name == stream.Name && before.Size == stream.Size
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

// write adds the differences of one map, and reports whether there are any.
func (writer *slotWriter) write(set string, have, want map[uint32]netip.Addr) (changed bool, err error) {
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
	// An element that changes is deleted before it is added.
	for part := range slices.Chunk(removed, fwstate.MaxElements) {
		if err := writer.reserve(len(part)); err != nil {
			return false, err
		}
		writer.transaction.DeleteElements(set, part)
	}
	for part := range slices.Chunk(added, fwstate.MaxElements) {
		if err := writer.reserve(len(part)); err != nil {
			return false, err
		}
		writer.transaction.AddElements(set, part)
	}
	return len(removed)+len(added) > 0, nil
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
	// Decided counts flows whose target answered, Denied flows that all targets denied.
	Decided, Denied uint64
}

// Read returns the sum of the counters of both tables.
func Read(conn *nft.Conn) (counters Counters, err error) {
	by := map[string]*uint64{
		commentAsked: &counters.Asked, commentFull: &counters.Full, commentDecided: &counters.Decided,
		commentDenied: &counters.Denied,
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
