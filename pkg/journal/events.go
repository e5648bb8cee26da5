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

// of returns the group of v, or nil if the event is not about v.
func (m *many) of(v vip.VIP) *group {
	if m == nil {
		return nil
	}
	i, found := slices.BinarySearchFunc(m.list, member{vip: v}, compareMembers)
	if !found {
		return nil
	}
	return &m.groups[m.list[i].group]
}

// about reports whether the event is about v; the zero VIP matches every event.
func (e entry) about(v vip.VIP) bool { return v.IsZero() || e.vip == v || e.many.of(v) != nil }

// reduced returns the event with the transition of v only, if it is about many VIPs.
func (e entry) reduced(v vip.VIP) *adminv1.Event {
	g := e.many.of(v)
	if g == nil {
		return e.event
	}
	event := g.event(v)
	event.Time, event.Sequence = e.event.GetTime(), e.event.GetSequence()
	event.Position, event.VipCount = e.event.GetPosition(), e.event.GetVipCount()
	return event
}

// events holds the newest events.
type events struct {
	list   []entry
	last   uint64   // number of the newest event
	vips   int      // sum of the members of all events
	newest *members // of the newest event about many VIPs
}

func (e *events) add(added entry) {
	e.last++
	added.event.Sequence = e.last
	e.list = append(e.list, added)
	if added.many != nil {
		e.newest = added.many.members
		if e.newest.events++; e.newest.events == 1 {
			e.vips += len(e.newest.list)
		}
	}
	for len(e.list) > maxEvents || e.vips > maxEventVIPs && e.vips > len(e.newest.list) {
		e.discardOldest()
	}
}

func (e *events) discardOldest() {
	if oldest := e.list[0].many; oldest != nil {
		if oldest.events--; oldest.events == 0 {
			e.vips -= len(oldest.list)
			if e.newest == oldest.members {
				e.newest = nil
			}
		}
	}
	e.list[0] = entry{} // frees the members: the array of the slice still holds the entry
	e.list = e.list[1:]
}

// share returns the n notable changes of a decision. It reuses the members of the newest event if
// they are equal.
func (e *events) share(changes *Changes, n int) *many {
	silent := func(m member) bool { return !changes.groups[m.group].Notable() }
	list := changes.members
	if len(list) > n {
		list = slices.DeleteFunc(list, silent)
	}
	shared := e.newest
	if shared == nil || !slices.Equal(shared.list, list) {
		shared = &members{list: slices.Clone(list)}
	}
	return &many{shared, slices.Clone(changes.groups)}
}

// oldest returns the number of the oldest kept event.
func (e *events) oldest() uint64 { return e.last - uint64(len(e.list)) + 1 }

func (e *events) at(number uint64) entry { return e.list[number-e.oldest()] }

// tail returns the number before the newest limit events about v. It returns after if fewer events
// match, or if limit is 0.
func (e *events) tail(after uint64, limit int, v vip.VIP) uint64 {
	for number := e.last; number > after && number >= e.oldest(); number-- {
		if e.at(number).about(v) {
			if limit--; limit == 0 {
				return number - 1
			}
		}
	}
	return after
}

// page returns up to limit events about v, the number up to which the page is complete, and the
// number of lost events.
func (e *events) page(after uint64, limit int, v vip.VIP) (found []*adminv1.Event, upTo, lost uint64) {
	if first := e.oldest(); after+1 < first {
		lost = first - 1 - after
		after = first - 1
	}
	for upTo = after; upTo < e.last && len(found) < limit; upTo++ {
		if next := e.at(upTo + 1); next.about(v) {
			found = append(found, next.reduced(v))
		}
	}
	return found, upTo, lost
}
