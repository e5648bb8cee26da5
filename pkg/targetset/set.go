package targetset

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Member is one target of a stream, united from all sources.
type Member struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs     []netip.Addr
	Origins OriginSet
	// Owner is the SPIFFE ID that registered it; "" for other sources.
	Owner string
	// Draining is Draining until DrainEnd and, after a drain by an operator, Drained. It is Ready for
	// a target that does not drain: its checks decide then.
	Draining healthcheck.State
	DrainEnd time.Time
	// Cause is the reason of its drain.
	Cause string
}

// manualDrain is the cause of a drain by an operator.
const manualDrain = "by an operator"

// Set unites the offers of all sources. It is pure, and belongs to one goroutine. Its cost follows
// the size of the streams that changed.
type Set struct {
	policy  AddressPolicy
	streams map[string]*streamState
	offers  [origins]Offers
	drains  map[ID]time.Time
	dirty   map[string]struct{}
	removed []string
	// ends maps each stream with a running drain to the end of its next one.
	ends map[string]time.Time
}

type streamState struct {
	config   trench.Stream // its Targets are the members
	members  []Member
	problems [origins][]string
}

// New returns an empty set.
func New() *Set {
	s := &Set{streams: map[string]*streamState{}, dirty: map[string]struct{}{}, ends: map[string]time.Time{}}
	for i := range s.offers {
		s.offers[i] = Offers{}
	}
	return s
}

// Configure replaces the streams and the policy. It ignores the Targets of the streams, which the
// trench file offers as a source.
func (s *Set) Configure(streams []trench.Stream, policy AddressPolicy) {
	s.policy = policy
	known := make(map[string]*streamState, len(streams))
	for _, c := range streams {
		st := s.streams[c.Name]
		if st == nil {
			st = &streamState{}
		}
		delete(s.streams, c.Name)
		st.config, known[c.Name] = c, st
		s.dirty[c.Name] = struct{}{}
	}
	for name := range s.streams {
		delete(s.ends, name)
		s.removed = append(s.removed, name)
	}
	s.streams = known
}

// Offer applies the changes of a source.
func (s *Set) Offer(o Origin, changed Offers) {
	for name, list := range changed {
		if len(list) == 0 {
			delete(s.offers[o], name)
		} else {
			s.offers[o][name] = list
		}
		s.dirty[name] = struct{}{}
	}
}

// SetManualDrains replaces the drains by operators. The map contains the end of each on the
// monotonic clock, and must not change later.
func (s *Set) SetManualDrains(drains map[ID]time.Time) {
	if !maps.EqualFunc(s.drains, drains, time.Time.Equal) {
		for _, ids := range []map[ID]time.Time{s.drains, drains} {
			for id := range ids {
				s.dirty[id.Stream] = struct{}{}
			}
		}
	}
	s.drains = drains
}

// Changes lists the changes of an update.
type Changes struct {
	// Streams lists the streams whose targets, or whose draining targets, changed, with all members
	// as Targets.
	Streams []trench.Stream
	// Removed lists the removed streams.
	Removed []string
	// Next is the time of the next Update without another input; zero for never.
	Next time.Time
}

// Update returns the changes since the last Update.
func (s *Set) Update(now time.Time) Changes {
	c := Changes{Removed: s.removed}
	s.removed = nil
	for name, end := range s.ends {
		if !end.After(now) {
			s.dirty[name] = struct{}{}
		}
	}
	for name := range s.dirty {
		if st, ok := s.streams[name]; ok {
			s.resolve(now, st)
			c.Streams = append(c.Streams, st.config)
		}
	}
	clear(s.dirty)
	for _, end := range s.ends {
		c.Next = Soonest(c.Next, end)
	}
	return c
}

// Members returns the targets of a stream. The list belongs to the set and is never changed.
func (s *Set) Members(stream string) []Member {
	if st, ok := s.streams[stream]; ok {
		return st.members
	}
	return nil
}

// Problems returns the refused offers of a source, each with its name and the reason.
func (s *Set) Problems(o Origin) []string {
	var all []string
	for _, st := range s.streams {
		all = append(all, st.problems[o]...)
	}
	slices.Sort(all)
	return all
}

// Count returns how many targets come from a source.
func (s *Set) Count(o Origin) int {
	n := 0
	for _, st := range s.streams {
		for _, m := range st.members {
			if m.Origins.Has(o) {
				n++
			}
		}
	}
	return n
}

// union unites the offers for one stream.
type union struct {
	*streamState
	policy AddressPolicy
	byName map[string]int // index in members
	byAddr map[netip.Addr]string
	over   map[string]Offer // targets whose announced end has passed
}

// originOffer is an offer with its source.
type originOffer struct {
	Origin
	Offer
}

// resolve unites the offers of all sources for one stream.
func (s *Set) resolve(now time.Time, st *streamState) {
	name := st.config.Name
	u := union{st, s.policy, map[string]int{}, map[netip.Addr]string{}, map[string]Offer{}}
	st.members, st.config.Targets, st.problems = nil, nil, [origins][]string{}
	var next time.Time
	var offered, leaving []originOffer
	for o := range Origin(origins) {
		for _, offer := range s.offers[o][name] {
			runs := offer.Lifecycle != Active && offer.DrainEnd.After(now)
			switch {
			case runs && offer.Lifecycle == Leaving:
				leaving = append(leaving, originOffer{o, offer})
			case runs, offer.Lifecycle == Active:
				offered = append(offered, originOffer{o, offer})
			case offer.Lifecycle == Terminating:
				// Its announced end has passed: exclude the target, whatever the remaining sources offer.
				u.over[offer.Name] = offer
			}
			if runs {
				next = Soonest(next, offer.DrainEnd)
			}
		}
	}
	for _, o := range offered {
		u.take(o.Origin, o.Offer)
	}
	// A target that leaves one source but is in a second one has not left, so leaving offers come
	// last. A target that leaves several sources drains until the last end.
	slices.SortStableFunc(leaving, func(a, b originOffer) int { return b.DrainEnd.Compare(a.DrainEnd) })
	for _, l := range leaving {
		u.leave(l.Origin, l.Offer)
	}
	for i := range st.members {
		m := &st.members[i]
		if end, ok := s.drains[ID{name, m.Name}]; ok {
			m.drain(now, end)
			if end.After(now) {
				next = Soonest(next, end)
			}
		}
		st.config.Targets = append(st.config.Targets, trench.Target{Name: m.Name, IPs: m.IPs})
	}
	if s.ends[name] = next; next.IsZero() {
		delete(s.ends, name)
	}
}

// drain applies a drain by an operator, which no source overrides.
func (m *Member) drain(now, end time.Time) {
	switch {
	case !end.After(now):
		m.Draining, m.DrainEnd, m.Cause = healthcheck.Drained, end, manualDrain
	case m.Draining != healthcheck.Draining || end.Before(m.DrainEnd):
		m.Draining, m.DrainEnd, m.Cause = healthcheck.Draining, end, manualDrain
	}
}

// end applies the drain of an offer. The earlier end counts.
func (m *Member) end(offer Offer) {
	if offer.Lifecycle == Active || (m.Draining == healthcheck.Draining && m.DrainEnd.Before(offer.DrainEnd)) {
		return
	}
	m.Draining, m.DrainEnd, m.Cause = healthcheck.Draining, offer.DrainEnd, offer.Cause
}

// take adds a target that is Active or Terminating, or records the problem that excludes it.
func (u *union) take(o Origin, offer Offer) {
	problem := func(format string, args ...any) {
		what := fmt.Sprintf("target %s of stream %s", offer.Name, u.config.Name)
		u.problems[o] = append(u.problems[o], what+fmt.Sprintf(format, args...))
	}
	if end, over := u.over[offer.Name]; over {
		problem(" has drained and left: %s", end.Cause)
		return
	}
	checked := false
	for _, a := range offer.IPs {
		if err := u.policy.Check(a); err != nil {
			problem(": %v", err)
			return
		}
		checked = checked || u.config.Check.Families.Has(vip.FamilyOf(a))
	}
	if !checked {
		problem(" has no address of a family that the stream's check looks at, so that nothing would check it")
		return
	}
	if i, known := u.byName[offer.Name]; known {
		m := &u.members[i]
		if !SameAddresses(m.IPs, offer.IPs) {
			problem(" has %s here and %s in %s, which counts", join(offer.IPs), join(m.IPs), m.Origins.Names()[0])
			return
		}
		m.Origins = m.Origins.With(o)
		m.end(offer)
		if m.Owner == "" {
			m.Owner = offer.Owner
		}
		return
	}
	for _, a := range offer.IPs {
		if other, taken := u.byAddr[a]; taken {
			problem(" has the address %s, which is target %s's: remove one of them", a, other)
			return
		}
	}
	u.byName[offer.Name] = len(u.members)
	u.add(o, offer, offer.IPs)
}

// leave adds a leaving target with the addresses that no other target has.
func (u *union) leave(o Origin, offer Offer) {
	var free []netip.Addr
	for _, a := range offer.IPs {
		_, taken := u.byAddr[a]
		over := slices.Contains(u.over[offer.Name].IPs, a)
		if !taken && !over && u.policy.Check(a) == nil {
			free = append(free, a)
		}
	}
	if len(free) > 0 {
		u.add(o, offer, free)
	}
}

func (u *union) add(o Origin, offer Offer, ips []netip.Addr) {
	for _, a := range ips {
		u.byAddr[a] = offer.Name
	}
	m := Member{
		Name: offer.Name, IPs: ips, Origins: OriginSet(0).With(o), Owner: offer.Owner, Draining: healthcheck.Ready,
	}
	m.end(offer)
	u.members = append(u.members, m)
}

// Soonest returns the earlier of two times, of which zero means never.
func Soonest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
