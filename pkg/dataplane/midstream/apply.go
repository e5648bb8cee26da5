package midstream

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

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

// Apply gives both tables the content for streams; a table without streams is removed. It returns
// the first difference that it found before, "" for none. known is the content of the last call if
// no other process changed nftables since: only differences are written. With nil the tables are
// read, before and after.
func Apply(conn *nft.Conn, mode Mode, streams Streams, known *Streams) (difference string, err error) {
	for _, family := range vip.Families {
		var before []Stream
		if known != nil {
			before = limited(known[family])
		}
		found, err := apply(conn, newBuilder(family, mode), before, limited(streams[family]), known != nil)
		if err != nil {
			return "", err
		}
		if difference == "" {
			difference = found
		}
	}
	return difference, nil
}

// apply is [Apply] for one table.
func apply(conn *nft.Conn, b *builder, before, after []Stream, known bool) (difference string, err error) {
	table := nft.Table{Family: tableFamily[b.family], Name: plan.TableName}
	switch {
	case len(after) == 0 && known && len(before) == 0:
		return "", nil
	case len(after) == 0:
		removed, err := conn.Remove(table)
		if removed {
			difference = "table without streams"
		}
		return difference, err
	}
	writer := writer{conn: conn, transaction: nft.Transaction{Table: table}}
	switch {
	case !known || resized(before, after) || sharesID(before) || sharesID(after):
		before, known = nil, false
		difference, _, err = conn.Ensure(b.table(after))
	case len(before) == 0:
		writer.transaction.Replace(b.table(after), nil)
	default:
		err = writer.writeObjects(b.changes(before, after))
	}
	if err != nil {
		return "", err
	}
	for _, stream := range after {
		if stream.asksEveryone() {
			continue
		}
		was := find(before, stream.Name)
		for order, asked := range stream.Asked {
			set, have := askedPrefixes[order]+stream.Name, map[uint32]netip.Addr(nil)
			if was != nil {
				have = was.Asked[order]
			} else if !known {
				if have, err = readSlots(conn, table, set); err != nil {
					return "", err
				}
			}
			changed, err := writer.write(set, have, asked)
			if err != nil {
				return "", err
			}
			if changed && difference == "" {
				difference = "elements of map " + table.String() + " " + set
			}
		}
	}
	return difference, writer.commit()
}

// resized reports whether a map of slots, which has the size of its stream, must be replaced.
func resized(before, after []Stream) bool {
	return slices.ContainsFunc(before, func(stream Stream) bool {
		next := find(after, stream.Name)
		return next != nil && next.Size != stream.Size
	})
}

// sharesID reports whether two streams have the same ID: its element in denialsMap cannot be derived
// from one of them alone.
func sharesID(streams []Stream) bool {
	ids := map[uint32]bool{}
	for i := range streams {
		ids[streams[i].id()] = true
	}
	return len(ids) < len(streams)
}

// find returns the stream with a name, nil for none.
func find(streams []Stream, name string) *Stream {
	i, found := slices.BinarySearchFunc(streams, name, func(stream Stream, name string) int {
		return strings.Compare(stream.Name, name)
	})
	if !found {
		return nil
	}
	return &streams[i]
}

// changes returns the objects of the streams that differ, before and after. Objects of other
// streams are equal: fwmarks belong to one stream. Link-layer addresses do not.
func (b *builder) changes(before, after []Stream) (have, want nft.Table) {
	var old, changed, same []Stream
	for _, stream := range before {
		if next := find(after, stream.Name); next == nil || !stream.sameObjects(next) {
			old = append(old, stream)
		}
	}
	for _, stream := range after {
		if was := find(before, stream.Name); was == nil || !stream.sameObjects(was) {
			changed = append(changed, stream)
		} else {
			same = append(same, stream)
		}
	}
	if len(old)+len(changed) == 0 {
		return have, want
	}
	return b.streamObjects(old, same), b.streamObjects(changed, same)
}

func (streams *Streams) equal(others *Streams) bool {
	same := func(a, b Stream) bool {
		return a.Name == b.Name && a.Size == b.Size && a.sameObjects(&b) &&
			sameMap(a.Asked[0], b.Asked[0]) && sameMap(a.Asked[1], b.Asked[1])
	}
	return slices.EqualFunc(streams[vip.IPv4], others[vip.IPv4], same) &&
		slices.EqualFunc(streams[vip.IPv6], others[vip.IPv6], same)
}

// sameObjects reports whether two streams differ at most in the elements of maps of slots.
func (stream *Stream) sameObjects(other *Stream) bool {
	return stream.Seed == other.Seed && stream.SCTP == other.SCTP && sameMap(stream.FWMarks, other.FWMarks) &&
		sameMap(stream.Everyone, other.Everyone)
}

// sameMap reports whether two maps are equal. Most are the same one: their owner passes the maps of
// an unchanged stream again.
func sameMap[Key, Value comparable](a, b map[Key]Value) bool {
	return reflect.ValueOf(a).UnsafePointer() == reflect.ValueOf(b).UnsafePointer() || maps.Equal(a, b)
}

// limited returns the streams that have maxTargets targets together, without those beyond it.
func limited(streams []Stream) (fitting []Stream) {
	room := maxTargets
	for _, stream := range streams {
		if targets := len(stream.FWMarks); targets <= room {
			room, fitting = room-targets, append(fitting, stream)
		}
	}
	return fitting
}

// Remove removes both tables.
func Remove(conn *nft.Conn) error {
	_, err := Apply(conn, Mode{}, Streams{}, nil)
	return err
}

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

// Counters counts packets since the tables were last written.
type Counters struct {
	// Asked counts copies to earlier targets, Full packets not copied as too many flows are undecided.
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
