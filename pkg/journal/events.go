package journal

import (
	"slices"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	maxEvents = 1000
	// maxEventVIPs bounds the sum of VIPs of all events about many VIPs; older events are discarded.
	// The newest such event is always kept. 100 000 VIPs take 4 MB and hold ten decisions, each about
	// 10 000 different VIPs.
	maxEventVIPs = 100_000
)

// entry is an event with the VIPs by which it is found.
type entry struct {
	event *adminv1.Event // immutable once it is added
	vip   vip.VIP        // zero unless the event is about one VIP
	many  *many          // nil unless the event is about more than MaxSingle VIPs
}

// many holds the VIPs of an event and their transitions. It is immutable.
type many struct {
	*members
	groups []group
}

// members holds the VIPs of an event in ascending order. Successive events with the same members
// share them: usually all VIPs of a stream are withdrawn and announced again.
type members struct {
	list   []member
	events int // number of kept events with these members
}

// of returns the group of a VIP, or nil if the event is not about it.
func (vips *many) of(prefix vip.VIP) *group {
	if vips == nil {
		return nil
	}
	i, found := slices.BinarySearchFunc(vips.list, member{vip: prefix}, compareMembers)
	if !found {
		return nil
	}
	return &vips.groups[vips.list[i].group]
}

// about reports whether the event is about a VIP; the zero VIP matches every event.
func (found entry) about(prefix vip.VIP) bool {
	return prefix.IsZero() || found.vip == prefix || found.many.of(prefix) != nil
}

// reduced returns an event about many VIPs with the transition of one of them only.
func (found entry) reduced(prefix vip.VIP) *adminv1.Event {
	part := found.many.of(prefix)
	if part == nil {
		return found.event
	}
	event := part.event(prefix)
	event.Time, event.Sequence = found.event.GetTime(), found.event.GetSequence()
	event.Position, event.VipCount = found.event.GetPosition(), found.event.GetVipCount()
	return event
}

type events struct {
	list   []entry
	last   uint64   // number of the newest event
	vips   int      // sum of the members of all events
	newest *members // of the newest event about many VIPs
}

func (kept *events) add(added entry) {
	kept.last++
	added.event.Sequence = kept.last
	kept.list = append(kept.list, added)
	if added.many != nil {
		kept.newest = added.many.members
		// Shared members take memory once.
		if kept.newest.events++; kept.newest.events == 1 {
			kept.vips += len(kept.newest.list)
		}
	}
	for len(kept.list) > maxEvents || kept.vips > maxEventVIPs && kept.vips > len(kept.newest.list) {
		kept.discardOldest()
	}
}

func (kept *events) discardOldest() {
	if oldest := kept.list[0].many; oldest != nil {
		if oldest.events--; oldest.events == 0 {
			kept.vips -= len(oldest.list)
			if kept.newest == oldest.members {
				kept.newest = nil
			}
		}
	}
	kept.list[0] = entry{} // frees the members: the array of the slice still holds the entry
	kept.list = kept.list[1:]
}

// share returns the notable changes of a decision, whose number is count. It reuses the members of
// the newest event if they are equal.
func (kept *events) share(changes *Changes, count int) *many {
	silent := func(m member) bool { return !changes.groups[m.group].Notable() }
	list := changes.members
	// The members include VIPs whose reason alone changed; count is the number of notable ones.
	if len(list) > count {
		list = slices.DeleteFunc(list, silent)
	}
	shared := kept.newest
	if shared == nil || !slices.Equal(shared.list, list) {
		shared = &members{list: slices.Clone(list)}
	}
	return &many{shared, slices.Clone(changes.groups)}
}

// oldest returns the number of the oldest kept event.
func (kept *events) oldest() uint64 { return kept.last - uint64(len(kept.list)) + 1 }

func (kept *events) at(number uint64) entry { return kept.list[number-kept.oldest()] }

// tail returns the number before the newest limit events about a VIP. It returns after if fewer
// match, or if limit is 0.
func (kept *events) tail(after uint64, limit int, prefix vip.VIP) uint64 {
	for number := kept.last; number > after && number >= kept.oldest(); number-- {
		if kept.at(number).about(prefix) {
			if limit--; limit == 0 {
				return number - 1
			}
		}
	}
	return after
}

// page returns up to limit events about a VIP, the number up to which the page is complete, and the
// number of lost events.
func (kept *events) page(after uint64, limit int, prefix vip.VIP) (found []*adminv1.Event, upTo, lost uint64) {
	if first := kept.oldest(); after+1 < first {
		lost = first - 1 - after
		after = first - 1
	}
	for upTo = after; upTo < kept.last && len(found) < limit; upTo++ {
		if next := kept.at(upTo + 1); next.about(prefix) {
			found = append(found, next.reduced(prefix))
		}
	}
	return found, upTo, lost
}
