package targetset

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Member is one target of a stream as all sources together say it is.
type Member struct {
	Name string
	// IPs are its addresses, one or two, at most one of a family.
	IPs     []netip.Addr
	Origins OriginSet
	// Owner is who registered it; "" for other sources.
	Owner string
	// Draining is Draining until DrainEnd, Drained after that when an operator
	// drains it, and Ready for a target that does not drain: then its checks decide.
	Draining healthcheck.State
	DrainEnd time.Time
	// Cause says why it drains.
	Cause string
}

// ManualDrain is a drain by an operator, as the set knows it.
type ManualDrain struct {
	// End is when flows end, on the monotonic clock.
	End time.Time
}

// manualDrain is the cause of a drain by an operator.
const manualDrain = "by an operator"

// Set unites what the sources offer. It is pure: it has no clock, no goroutine and
// does no I/O, and belongs to one goroutine.
//
// Its cost follows the size of the streams that changed.
type Set struct {
	policy  AddressPolicy
	streams map[string]*streamState
	offers  [origins]Offers
	orders  map[ID]ManualDrain
	dirty   map[string]struct{}
	removed []string
	// ends is when the next drain of a stream ends, for those in which one runs.
	ends map[string]time.Time
}

type streamState struct {
	config   trench.Stream // Targets are the members
	members  []Member
	problems [origins][]string
}

// NewSet returns an empty set.
func New() *Set {
	s := &Set{
		streams: map[string]*streamState{}, orders: map[ID]ManualDrain{}, dirty: map[string]struct{}{},
		ends: map[string]time.Time{},
	}
	for i := range s.offers {
		s.offers[i] = Offers{}
	}
	return s
}

// Configure replaces the streams and says where targets may be. The streams' own
// Targets do not count: the trench file is a source like the others.
func (s *Set) Configure(streams []trench.Stream, policy AddressPolicy) {
	s.policy = policy
	known := make(map[string]struct{}, len(streams))
	for _, c := range streams {
		c.Targets = nil
		known[c.Name] = struct{}{}
		if st, ok := s.streams[c.Name]; ok {
			st.config = c
		} else {
			s.streams[c.Name] = &streamState{config: c}
		}
		s.dirty[c.Name] = struct{}{}
	}
	for name := range s.streams {
		if _, ok := known[name]; !ok {
			delete(s.streams, name)
			delete(s.ends, name)
			s.removed = append(s.removed, name)
		}
	}
}

// Offer takes over what changed in a source.
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

// SetManualDrains replaces the drains by operators.
func (s *Set) SetManualDrains(orders map[ID]ManualDrain) {
	for id, o := range orders {
		if s.orders[id] != o {
			s.dirty[id.Stream] = struct{}{}
		}
	}
	for id := range s.orders {
		if _, ok := orders[id]; !ok {
			s.dirty[id.Stream] = struct{}{}
		}
	}
	s.orders = orders
}

// Changes are what an update changed.
type Changes struct {
	// Streams are those with other targets, or other targets that drain, than
	// before, with all members as Targets.
	Streams []trench.Stream
	// Removed are streams that are gone.
	Removed []string
	// Next is when Update has something to do although nothing else happens; zero
	// for never.
	Next time.Time
}

// Update works out what changed.
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

// Members returns the targets of a stream. The list belongs to the set and is
// never changed.
func (s *Set) Members(stream string) []Member {
	if st, ok := s.streams[stream]; ok {
		return st.members
	}
	return nil
}

// Problems returns what a source offers and is not taken: each with its name and why.
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

// Has reports whether a stream has a target of the name.
func (s *Set) Has(id ID) bool {
	return slices.ContainsFunc(s.Members(id.Stream), func(m Member) bool { return m.Name == id.Name })
}

// resolve unites what the sources offer for one stream.
func (s *Set) resolve(now time.Time, st *streamState) {
	name := st.config.Name
	u := union{
		stream: st, policy: s.policy, byName: map[string]int{}, byAddr: map[netip.Addr]string{},
		over: map[string]Offer{},
	}
	st.problems = [origins][]string{}
	var next time.Time
	var leaving []originOffer
	for o := range s.offers {
		for _, offer := range s.offers[o][name] {
			if offer.Lifecycle == Active {
				continue
			}
			switch ends := offer.DrainEnd.After(now); {
			case !ends && offer.Lifecycle == Terminating:
				u.over[offer.Name] = offer
			case ends:
				next = Soonest(next, offer.DrainEnd)
				if offer.Lifecycle == Leaving {
					leaving = append(leaving, originOffer{Origin(o), offer})
				}
			}
		}
	}
	for o := range s.offers {
		for _, offer := range s.offers[o][name] {
			if offer.Lifecycle == Active || (offer.Lifecycle == Terminating && offer.DrainEnd.After(now)) {
				u.take(Origin(o), offer)
			}
		}
	}
	// What leaves one source and is in another has not left. What leaves several
	// leaves with the last.
	slices.SortStableFunc(leaving, func(a, b originOffer) int { return b.DrainEnd.Compare(a.DrainEnd) })
	for _, l := range leaving {
		u.leave(l.Origin, l.Offer)
	}
	st.members, st.config.Targets = u.members, nil
	for i := range st.members {
		m := &st.members[i]
		if order, ok := s.orders[ID{name, m.Name}]; ok {
			m.drainByHand(now, order)
			if order.End.After(now) {
				next = Soonest(next, order.End)
			}
		}
		st.config.Targets = append(st.config.Targets, trench.Target{Name: m.Name, IPs: m.IPs})
	}
	if next.IsZero() {
		delete(s.ends, name)
	} else {
		s.ends[name] = next
	}
}

// originOffer is an offer with the source that makes it.
type originOffer struct {
	Origin
	Offer
}

// drainByHand lays a drain by an operator over what the sources say. No source overrides it.
func (m *Member) drainByHand(now time.Time, o ManualDrain) {
	switch {
	case !o.End.After(now):
		m.Draining, m.DrainEnd, m.Cause = healthcheck.Drained, o.End, manualDrain
	case m.Draining != healthcheck.Draining || o.End.Before(m.DrainEnd):
		m.Draining, m.DrainEnd, m.Cause = healthcheck.Draining, o.End, manualDrain
	}
}

// union unites the offers for one stream.
type union struct {
	stream  *streamState
	policy  AddressPolicy
	members []Member
	byName  map[string]int
	byAddr  map[netip.Addr]string
	// over are the targets whose end a source announced, and which had it.
	over map[string]Offer
}

func (u *union) problem(o Origin, format string, args ...any) {
	u.stream.problems[o] = append(u.stream.problems[o], fmt.Sprintf(format, args...))
}

// take adds a target that is there, or ends.
func (u *union) take(o Origin, offer Offer) {
	what := fmt.Sprintf("target %s of stream %s", offer.Name, u.stream.config.Name)
	if end, over := u.over[offer.Name]; over {
		u.problem(o, "%s has drained and left: %s", what, end.Cause)
		return
	}
	checked := false
	for _, a := range offer.IPs {
		if err := u.policy.Check(a); err != nil {
			u.problem(o, "%s: %v", what, err)
			return
		}
		checked = checked || u.stream.config.Check.Families.Has(vip.FamilyOf(a))
	}
	if !checked {
		u.problem(o, "%s has no address of a family that the stream's check looks at, so that nothing would check it", what)
		return
	}
	if i, known := u.byName[offer.Name]; known {
		m := &u.members[i]
		if !SameAddresses(m.IPs, offer.IPs) {
			u.problem(o, "%s has %s here and %s in %s, which counts", what, join(offer.IPs), join(m.IPs), m.Origins.Names()[0])
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
			u.problem(o, "%s has the address %s, which is target %s's: remove one of them", what, a, other)
			return
		}
	}
	for _, a := range offer.IPs {
		u.byAddr[a] = offer.Name
	}
	u.byName[offer.Name] = len(u.members)
	m := Member{
		Name: offer.Name, IPs: offer.IPs, Origins: OriginSet(0).With(o), Owner: offer.Owner,
		Draining: healthcheck.Ready,
	}
	m.end(offer)
	u.members = append(u.members, m)
}

// leave adds what is left of a target that leaves: addresses that no target has taken over.
func (u *union) leave(o Origin, offer Offer) {
	var free []netip.Addr
	for _, a := range offer.IPs {
		_, taken := u.byAddr[a]
		if over := slices.Contains(u.over[offer.Name].IPs, a); !taken && !over && u.policy.Check(a) == nil {
			free = append(free, a)
			u.byAddr[a] = offer.Name
		}
	}
	if len(free) == 0 {
		return
	}
	m := Member{
		Name: offer.Name, IPs: free, Origins: OriginSet(0).With(o), Owner: offer.Owner,
		Draining: healthcheck.Ready,
	}
	m.end(offer)
	u.members = append(u.members, m)
}

// end notes that an offer says the target ends. The earlier end counts.
func (m *Member) end(offer Offer) {
	if offer.Lifecycle == Active || (m.Draining == healthcheck.Draining && m.DrainEnd.Before(offer.DrainEnd)) {
		return
	}
	m.Draining, m.DrainEnd, m.Cause = healthcheck.Draining, offer.DrainEnd, offer.Cause
}

// SameAddresses reports whether two lists have the same addresses, in any order.
func SameAddresses(a, b []netip.Addr) bool {
	if len(a) != len(b) {
		return false
	}
	for _, x := range a {
		if !slices.Contains(b, x) {
			return false
		}
	}
	return true
}
