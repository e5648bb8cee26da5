package frontend

import (
	"iter"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	maxEvents           = 1000 // kept for `frontend events`
	maxEventsPerMessage = 256  // of WatchEvents
	// maxEventVIPs bounds the sum of VIPs of all bulk events; older events are discarded. The newest
	// bulk event is always kept. 100 000 VIPs take 4 MB and hold ten decisions, each about 10 000
	// different VIPs.
	maxEventVIPs = 100_000
	// maxEventDetails bounds the details of a bulk event, which has one detail for each failed
	// stream. Further VIPs have no detail.
	maxEventDetails = 16
)

// event is a transition of a VIP, of many VIPs or of a gateway. Without any of them, it is an
// event of the frontend itself.
type event struct {
	Sequence  uint64
	Time      time.Time
	VIP       vip.VIP
	From, To  gate.Decision
	Position  readiness.Position // of the load balancer
	Detail    string
	Gateway   string
	GatewayUp bool
	Bulk      *bulk // nil unless the event has many VIPs
}

// transition is a change that several VIPs of one decision share, with the shown advertisements.
type transition struct {
	family vip.Family
	from   gate.Advertisement
	to     gate.Decision
	isNew  bool // the VIPs were added to the configuration and are withdrawn
}

func transitionOf(ch gate.Change) transition {
	return transition{
		ch.VIP.Family(), shown(ch.From), ch.To,
		ch.From.Reason == gate.NotConfigured && shown(ch.From) == shown(ch.To),
	}
}

// changed reports whether the advertisement changed.
func (t transition) changed() bool { return t.from != shown(t.to) }

// notable reports whether the transition is an event: the VIPs are new, or their advertisement
// changed.
func (t transition) notable() bool { return t.changed() || t.isNew }

// bulk holds the transitions of more than status.MaxSingle VIPs by one decision. It is immutable.
type bulk struct {
	*members
	groups []group
}

// group counts VIPs with the same transition and detail.
type group struct {
	transition
	count  int
	detail string
}

// members holds the VIPs of an event in ascending order. Successive events with the same members
// share them, as when all VIPs are withdrawn and announced again.
type members struct {
	list   []member
	events int // number of kept events with these members
}

// member is a VIP and the index of its group.
type member struct {
	vip   vip.VIP
	group uint16
}

func compareMembers(a, b member) int { return vip.Compare(a.vip, b.vip) }

// of returns the group of v, or nil if the event does not contain v.
func (b *bulk) of(v vip.VIP) *group {
	if b == nil {
		return nil
	}
	i, found := slices.BinarySearchFunc(b.list, member{vip: v}, compareMembers)
	if !found {
		return nil
	}
	return &b.groups[b.list[i].group]
}

// first returns the names of the first VIPs. With changed, it skips VIPs whose advertisement did
// not change.
func (b *bulk) first(changed bool) (names []string) {
	for _, m := range b.list {
		if len(names) == status.MaxFirstVIPs {
			break
		}
		if b.groups[m.group].changed() || !changed {
			names = append(names, m.vip.String())
		}
	}
	return names
}

// byTransition merges groups that differ only in their detail, and keeps the detail of the first
// VIP.
func (b *bulk) byTransition() (list []group) {
	for _, g := range b.groups {
		same := func(x group) bool { return x.transition == g.transition }
		if i := slices.IndexFunc(list, same); i >= 0 {
			list[i].count += g.count
		} else {
			list = append(list, g)
		}
	}
	return list
}

// transitions returns the transitions in words, largest first. With changed, it skips transitions
// that did not change the advertisement.
func (b *bulk) transitions(changed bool) (list []status.Transitions) {
	for _, g := range b.byTransition() {
		if g.changed() || !changed {
			list = append(list, status.Transitions{
				Count: g.count, Family: g.family.String(), From: g.from.String(), To: shown(g.to).String(),
				Reason: g.to.Reason.String(), Detail: g.detail,
			})
		}
	}
	slices.SortStableFunc(list, status.LargestFirst)
	return list
}

// events holds the newest events.
type events struct {
	list   []event
	last   uint64   // sequence number of the newest event
	vips   int      // sum of the members of all events
	newest *members // of the newest bulk event
}

func (e *events) add(x event) {
	e.last++
	x.Sequence = e.last
	e.list = append(e.list, x)
	if x.Bulk != nil {
		e.newest = x.Bulk.members
		if e.newest.events++; e.newest.events == 1 {
			e.vips += len(e.newest.list)
		}
	}
	for len(e.list) > maxEvents || e.vips > maxEventVIPs && e.vips > len(e.newest.list) {
		e.discardOldest()
	}
}

func (e *events) discardOldest() {
	if b := e.list[0].Bulk; b != nil {
		if b.events--; b.events == 0 {
			e.vips -= len(b.list)
			if e.newest == b.members {
				e.newest = nil
			}
		}
	}
	e.list[0] = event{} // frees the members: the array of the slice still holds the event
	e.list = e.list[1:]
}

// members returns n members. It reuses the members of the newest event if they are equal.
func (e *events) members(n int, all iter.Seq[member]) *members {
	if e.newest != nil && len(e.newest.list) == n {
		i, same := 0, true
		for m := range all {
			if same = e.newest.list[i] == m; !same {
				break
			}
			i++
		}
		if same {
			return e.newest
		}
	}
	m := &members{list: slices.AppendSeq(make([]member, 0, n), all)}
	slices.SortFunc(m.list, compareMembers)
	return m
}

// oldest returns the sequence number of the oldest kept event.
func (e *events) oldest() uint64 { return e.last - uint64(len(e.list)) + 1 }

func (e *events) at(sequence uint64) event { return e.list[sequence-e.oldest()] }

// tail returns the sequence number before the newest n matching events. It returns after if fewer
// events match, or if n is 0.
func (e *events) tail(after uint64, n int, match func(event) bool) uint64 {
	for at := e.last; at > after && at >= e.oldest(); at-- {
		if match(e.at(at)) {
			if n--; n == 0 {
				return at - 1
			}
		}
	}
	return after
}

// page returns up to n matching events, the sequence number up to which the page is complete, and
// the number of lost events.
func (e *events) page(after uint64, n int, match func(event) bool) (found []event, upTo, lost uint64) {
	if first := e.oldest(); after+1 < first {
		lost = first - 1 - after
		after = first - 1
	}
	for upTo = after; upTo < e.last && len(found) < n; upTo++ {
		if x := e.at(upTo + 1); match(x) {
			found = append(found, x)
		}
	}
	return found, upTo, lost
}

// about returns a function that matches the events of v, or all events if v is zero.
func about(v vip.VIP) func(event) bool {
	if v.IsZero() {
		return func(event) bool { return true }
	}
	return func(e event) bool { return e.VIP == v || e.Bulk.of(v) != nil }
}

// eventsProto converts events. It reduces bulk events to v, unless v is zero.
func eventsProto(events []event, v vip.VIP) []*frontendv1.Event {
	list := make([]*frontendv1.Event, len(events))
	for i, e := range events {
		if g := e.Bulk.of(v); g != nil {
			e.VIP, e.From.Advertisement, e.To, e.Detail = v, g.from, g.to, g.detail
		}
		p := &frontendv1.Event{
			Time: timestamppb.New(e.Time), Sequence: e.Sequence, Vip: e.VIP.String(), Detail: e.Detail,
			Gateway: e.Gateway, GatewayUp: e.GatewayUp, Position: e.Position.Proto(),
		}
		if !e.VIP.IsZero() {
			p.From, p.To = advertisementProto(shown(e.From)), advertisementProto(shown(e.To))
			p.Reason = reasonProto(e.To.Reason)
		}
		if e.Bulk != nil {
			e.Bulk.proto(p)
		}
		list[i] = p
	}
	return list
}

// proto adds the transitions of all VIPs to an event, unless the event is reduced to one VIP.
func (b *bulk) proto(p *frontendv1.Event) {
	p.VipCount = uint32(len(b.list))
	if p.GetVip() != "" {
		return
	}
	p.FirstVips = b.first(false)
	p.Detail = status.DescribeVIPs(b.transitions(false), p.GetFirstVips(), len(b.list))
	for _, g := range b.byTransition() {
		p.Transitions = append(p.Transitions, &frontendv1.VipTransitions{
			Count: uint32(g.count), Family: familyProto(g.family), From: advertisementProto(g.from),
			To: advertisementProto(shown(g.to)), Reason: reasonProto(g.to.Reason), Detail: g.detail,
		})
	}
	slices.SortStableFunc(p.GetTransitions(), func(a, b *frontendv1.VipTransitions) int {
		return int(b.GetCount()) - int(a.GetCount())
	})
	from, to, reason := status.Common(b.transitions(false))
	first := b.groups[0].transition
	if from != "" {
		p.From = advertisementProto(first.from)
	}
	if to != "" {
		p.To = advertisementProto(shown(first.to))
	}
	if reason != "" {
		p.Reason = reasonProto(first.to.Reason)
	}
}

var ipFamilies = [...]readinessv1.IpFamily{
	vip.IPv4: readinessv1.IpFamily_IP_FAMILY_IPV4,
	vip.IPv6: readinessv1.IpFamily_IP_FAMILY_IPV6,
}

func familyProto(f vip.Family) readinessv1.IpFamily { return ipFamilies[f] }
