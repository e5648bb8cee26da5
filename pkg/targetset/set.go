package targetset

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/drains"
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
	drains  map[ID]drains.Drain
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
	set := &Set{streams: map[string]*streamState{}, dirty: map[string]struct{}{}, ends: map[string]time.Time{}}
	for i := range set.offers {
		set.offers[i] = Offers{}
	}
	return set
}

// Configure replaces the streams and the policy. It ignores the Targets of the streams, which the
// trench file offers as a source.
func (set *Set) Configure(streams []trench.Stream, policy AddressPolicy) {
	set.policy = policy
	known := make(map[string]*streamState, len(streams))
	for _, stream := range streams {
		state := cmp.Or(set.streams[stream.Name], &streamState{})
		delete(set.streams, stream.Name)
		state.config, known[stream.Name] = stream, state
		// The policy may have changed, so the offers of all streams are checked again.
		set.dirty[stream.Name] = struct{}{}
	}
	// The map now has only the streams that are no longer configured.
	for name := range set.streams {
		delete(set.ends, name)
		set.removed = append(set.removed, name)
	}
	set.streams = known
}

// Offer applies the changes of a source.
func (set *Set) Offer(origin Origin, changed Offers) {
	for name, list := range changed {
		if len(list) == 0 {
			delete(set.offers[origin], name)
		} else {
			set.offers[origin][name] = list
		}
		set.dirty[name] = struct{}{}
	}
}

// SetManualDrains replaces the drains by operators. The map must not change later.
func (set *Set) SetManualDrains(orders map[ID]drains.Drain) {
	if !maps.Equal(set.drains, orders) {
		// The old map has the streams of ended drains, the new map those of new drains.
		for _, ids := range []map[ID]drains.Drain{set.drains, orders} {
			for id := range ids {
				set.dirty[id.Stream] = struct{}{}
			}
		}
	}
	set.drains = orders
}

// Changes lists the changes of an update.
type Changes struct {
	// Streams lists the streams whose targets or drains changed, with all members as Targets.
	Streams []trench.Stream
	// Removed lists the removed streams.
	Removed []string
	// Next is the time of the next Update without another input; zero for never.
	Next time.Time
}

// Update returns the changes since the last Update.
func (set *Set) Update(now time.Time) Changes {
	changes := Changes{Removed: set.removed}
	set.removed = nil
	// The end of a drain is a change without an input.
	for name, end := range set.ends {
		if !end.After(now) {
			set.dirty[name] = struct{}{}
		}
	}
	for name := range set.dirty {
		if state, ok := set.streams[name]; ok {
			set.resolve(now, state)
			changes.Streams = append(changes.Streams, state.config)
		}
	}
	clear(set.dirty)
	for _, end := range set.ends {
		changes.Next = Soonest(changes.Next, end)
	}
	return changes
}

// Members returns the targets of a stream. The list belongs to the set and is never changed.
func (set *Set) Members(stream string) []Member {
	if st, ok := set.streams[stream]; ok {
		return st.members
	}
	return nil
}

// Problems returns the refused offers of a source, each with its name and the reason.
func (set *Set) Problems(origin Origin) []string {
	var all []string
	for _, st := range set.streams {
		all = append(all, st.problems[origin]...)
	}
	slices.Sort(all)
	return all
}

// Count returns how many targets come from a source.
func (set *Set) Count(origin Origin) int {
	n := 0
	for _, st := range set.streams {
		for _, m := range st.members {
			if m.Origins.Has(origin) {
				n++
			}
		}
	}
	return n
}

type union struct {
	*streamState
	policy AddressPolicy
	byName map[string]int // index in members
	byAddr map[netip.Addr]string
	over   map[string]Offer // targets whose announced end has passed
}

type originOffer struct {
	Origin
	Offer
}

// resolve unites the offers of all sources for one stream.
func (set *Set) resolve(now time.Time, state *streamState) {
	name := state.config.Name
	u := union{state, set.policy, map[string]int{}, map[netip.Addr]string{}, map[string]Offer{}}
	// Allocate new lists: callers of Members and Update keep the old ones.
	state.members, state.config.Targets, state.problems = nil, nil, [origins][]string{}
	var next time.Time
	var offered, leaving []originOffer
	for origin := range Origin(origins) {
		for _, offer := range set.offers[origin][name] {
			runs := offer.Lifecycle != Active && offer.DrainEnd.After(now)
			switch {
			case runs && offer.Lifecycle == Leaving:
				leaving = append(leaving, originOffer{origin, offer})
			case runs, offer.Lifecycle == Active:
				offered = append(offered, originOffer{origin, offer})
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
	// Drains by an operator come last: no source overrides them.
	for i := range state.members {
		member := &state.members[i]
		if order, ok := set.drains[ID{name, member.Name}]; ok {
			member.drain(now, order)
			if order.End.After(now) {
				next = Soonest(next, order.End)
			}
		}
		state.config.Targets = append(state.config.Targets, trench.Target{Name: member.Name, IPs: member.IPs})
	}
	if set.ends[name] = next; next.IsZero() {
		delete(set.ends, name)
	}
}

// drain applies a drain by an operator, which no source overrides.
func (member *Member) drain(now time.Time, order drains.Drain) {
	cause := manualDrain
	if !order.Over.IsZero() {
		cause += ", until " + order.Over.UTC().Format(time.RFC3339)
	}
	switch {
	case !order.End.After(now):
		member.Draining, member.DrainEnd, member.Cause = healthcheck.Drained, order.End, cause
	case member.Draining != healthcheck.Draining || order.End.Before(member.DrainEnd):
		member.Draining, member.DrainEnd, member.Cause = healthcheck.Draining, order.End, cause
	}
}

// end applies the drain of an offer. The earlier end counts.
func (member *Member) end(offer Offer) {
	if offer.Lifecycle == Active || (member.Draining == healthcheck.Draining && member.DrainEnd.Before(offer.DrainEnd)) {
		return
	}
	member.Draining, member.DrainEnd, member.Cause = healthcheck.Draining, offer.DrainEnd, offer.Cause
}

// take adds a target that is Active or Terminating, or records the problem that excludes it.
func (union *union) take(origin Origin, offer Offer) {
	problem := func(format string, args ...any) {
		what := fmt.Sprintf("target %s of stream %s", offer.Name, union.config.Name)
		union.problems[origin] = append(union.problems[origin], what+fmt.Sprintf(format, args...))
	}
	if end, over := union.over[offer.Name]; over {
		problem(" has drained and left: %s", end.Cause)
		return
	}
	// A target is taken with all of its addresses or not at all.
	checked := false
	for _, address := range offer.IPs {
		if err := union.policy.Check(address); err != nil {
			problem(": %v", err)
			return
		}
		checked = checked || union.config.Check.Families.Has(vip.FamilyOf(address))
	}
	if !checked {
		problem(" has no address of a family that the stream's check looks at, so that nothing would check it")
		return
	}
	// Origins are taken in the order of precedence, so the first offer of a name counts.
	if i, known := union.byName[offer.Name]; known {
		member := &union.members[i]
		if !SameAddresses(member.IPs, offer.IPs) {
			problem(" has %s here and %s in %s, which counts", join(offer.IPs), join(member.IPs), member.Origins.Names()[0])
			return
		}
		member.Origins = member.Origins.With(origin)
		member.end(offer)
		if member.Owner == "" {
			member.Owner = offer.Owner
		}
		return
	}
	// Two targets with one address would share its routes and get one health.
	for _, address := range offer.IPs {
		if other, taken := union.byAddr[address]; taken {
			problem(" has the address %s, which is target %s's: remove one of them", address, other)
			return
		}
	}
	union.byName[offer.Name] = len(union.members)
	union.add(origin, offer, offer.IPs)
}

// leave adds a leaving target with the addresses that no other target has.
func (union *union) leave(origin Origin, offer Offer) {
	var free []netip.Addr
	for _, address := range offer.IPs {
		_, taken := union.byAddr[address]
		over := slices.Contains(union.over[offer.Name].IPs, address)
		if !taken && !over && union.policy.Check(address) == nil {
			free = append(free, address)
		}
	}
	if len(free) > 0 {
		union.add(origin, offer, free)
	}
}

func (union *union) add(origin Origin, offer Offer, ips []netip.Addr) {
	for _, a := range ips {
		union.byAddr[a] = offer.Name
	}
	member := Member{
		Name: offer.Name, IPs: ips, Origins: OriginSet(0).With(origin), Owner: offer.Owner, Draining: healthcheck.Ready,
	}
	member.end(offer)
	union.members = append(union.members, member)
}

// Soonest returns the earlier of two times, of which zero means never.
func Soonest(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}
