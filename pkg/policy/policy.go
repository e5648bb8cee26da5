package policy

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// state is the state of a VIP that selects its attributes.
type state uint8

const (
	ready state = iota
	draining
	unknown
	backup
	states
)

// names are the words of the states in the trench file.
var names = [states]string{"ready", "draining", "unknown", "backup"}

// encoded is a policy.
type encoded struct {
	index      int // in the attractor
	attributes [states][announce.Announced + 1]*template
	texts      [states]string // of the attributes
	causes     [states]string // the same with the policy and the state
}

// template encodes the attributes of a state.
type template struct {
	communities []uint32
	large       []announce.LargeCommunity
	metrics     announce.Metrics // without bandwidth; zero unless encoded directly
	prepend     uint8
	encoding    Encoding
	// bandwidth is the link bandwidth of a tenth of a ready target in bytes per second; 0 for none.
	bandwidth float32
	encoded   map[uint32]announce.Attributes // by weight, as far as used
}

// Policies are the policies of an attractor. The zero value has none. Routes are not safe
// for concurrent use; texts are.
type Policies struct {
	own    map[vip.VIP]*encoded
	sorted []entry  // of own, by VIP
	rest   *encoded // of VIPs without a policy of their own; nil without one
	weighs bool
}

type entry struct {
	vip    vip.VIP
	policy *encoded
}

// Lookup finds the policies of a batch of VIPs. VIPs of a decision ascend, so most need no lookup
// in the map, which takes 0.2 µs. It is not safe for concurrent use. A nil Lookup has no policies.
type Lookup struct {
	Policies
	next int // expected index in sorted
}

// Lookup returns a Lookup at the first VIP.
func (all Policies) Lookup() *Lookup { return &Lookup{Policies: all} }

func (lookup *Lookup) of(v vip.VIP) *encoded {
	if lookup == nil {
		return nil
	}
	if next := lookup.next; next < len(lookup.sorted) && lookup.sorted[next].vip == v {
		lookup.next++
		return lookup.sorted[next].policy
	}
	found := lookup.Policies.of(v)
	if found != lookup.rest {
		index, _ := slices.BinarySearchFunc(lookup.sorted, v,
			func(entry entry, v vip.VIP) int { return vip.Compare(entry.vip, v) })
		lookup.next = index + 1
	}
	return found
}

// Weigh reports whether attributes depend on the weights of decisions.
func (all Policies) Weigh() bool { return all.weighs }

// Encoding is how attributes reach the gateways.
type Encoding struct {
	direct   bool
	internal bool   // iBGP, which has LOCAL_PREF
	linkAS   uint16 // of link bandwidths
}

// Carried encodes attributes as communities, from which BIRD's export filter makes attributes.
var Carried = Encoding{}

// asTrans represents an AS number of four octets (RFC 6793).
const asTrans = 23456

// Direct encodes attributes themselves, for a speaker that another program configures. The numbers
// are the AS of the speaker and of the announcer.
func Direct(as, announcer uint32) Encoding {
	encoding := Encoding{direct: true, internal: as == announcer, linkAS: asTrans}
	if as <= math.MaxUint16 {
		encoding.linkAS = uint16(as)
	}
	return encoding
}

// New returns the policies of a valid attractor.
func New(policies []trench.Policy, encoding Encoding) (all Policies, err error) {
	all.own = map[vip.VIP]*encoded{}
	for i, policy := range policies {
		encoded := &encoded{index: i}
		for of, own := range byState(&policy) {
			attributes := *cmp.Or(own, &policy.Ready)
			// LOCAL_PREF replaces that of a de-preferred VIP: only a state of such VIPs may have one.
			if own == nil && state(of) != unknown {
				attributes.LocalPreference = 0
			}
			encoded.texts[of] = text(&attributes)
			encoded.causes[of] = fmt.Sprintf("policy %d, %s: %s", i, names[of], encoded.texts[of])
			all.weighs = all.weighs || attributes.TargetBandwidth > 0
			for _, advertisement := range []announce.Advertisement{announce.Announced, announce.Depreferred} {
				if state(of) == unknown && advertisement == announce.Depreferred {
					attributes.LocalPreference = 0
				}
				if encoded.attributes[of][advertisement], err = newTemplate(&attributes, advertisement, encoding); err != nil {
					return Policies{}, fmt.Errorf("failed to encode policy %d: %w", i, err)
				}
			}
		}
		if len(policy.VIPs) == 0 {
			all.rest = encoded
		}
		for _, v := range policy.VIPs {
			all.own[v] = encoded
			all.sorted = append(all.sorted, entry{v, encoded})
		}
	}
	slices.SortFunc(all.sorted, func(a, b entry) int { return vip.Compare(a.vip, b.vip) })
	return all, nil
}

// megabit is 1 Mbit/s in bytes per second, the unit of link bandwidths.
const megabit = 1e6 / 8

// newTemplate returns the communities for the announcer.
func newTemplate(attributes *trench.Attributes, advertisement announce.Advertisement, encoding Encoding,
) (*template, error) {
	all := &template{
		bandwidth: megabit / 10 * float32(attributes.TargetBandwidth), encoded: map[uint32]announce.Attributes{},
		encoding: encoding,
	}
	if advertisement == announce.Depreferred {
		all.communities = append(all.communities, announce.GracefulShutdown)
	}
	for _, text := range attributes.Communities {
		community, ok := trench.ParseCommunity(text)
		switch {
		case !ok:
			return nil, fmt.Errorf("%q is no community", text)
		case len(community) == 2:
			all.communities = append(all.communities, community[0]<<16|community[1])
		default:
			all.large = append(all.large, announce.LargeCommunity(community))
		}
	}
	if encoding.direct {
		all.prepend = uint8(attributes.Prepend)
		all.metrics = announce.Metrics{MED: uint32(attributes.MED), LinkAS: encoding.linkAS}
		if encoding.internal {
			all.metrics.LocalPreference = uint32(attributes.LocalPreference)
		}
		return all, nil
	}
	carry := func(function uint32, value int64) {
		if value > 0 {
			all.large = append(all.large, announce.LargeCommunity{trench.PolicyAS, function, uint32(value)})
		}
	}
	carry(trench.MEDFunction, attributes.MED)
	carry(trench.PrependFunction, int64(attributes.Prepend))
	carry(trench.PreferenceFunction, attributes.LocalPreference)
	return all, nil
}

// encode returns the attributes of a VIP by its weight. Without a weight it has no link bandwidth,
// so that routers share flows equally.
func (all *template) encode(weight uint32) announce.Attributes {
	if all.bandwidth == 0 {
		weight = 0
	}
	encoded, known := all.encoded[weight]
	if !known {
		large, metrics, bandwidth := slices.Clip(all.large), all.metrics, float32(weight)*all.bandwidth
		switch {
		case all.encoding.direct:
			metrics.Bandwidth = bandwidth
		case weight > 0:
			large = append(large, announce.LargeCommunity{
				trench.PolicyAS, trench.BandwidthFunction, math.Float32bits(bandwidth),
			})
		}
		encoded = metrics.Attributes(all.communities, large)
		all.encoded[weight] = encoded
	}
	return encoded
}

// of returns the policy of a VIP; nil without one.
func (all Policies) of(v vip.VIP) *encoded {
	if own := all.own[v]; own != nil {
		return own
	}
	return all.rest
}

// stateOf returns the state by a decision that advertises the VIP.
func stateOf(decision gate.Decision) state {
	switch {
	case decision.Reason == gate.LBStale:
		return unknown
	case decision.Reason == gate.LastResort, decision.Reason == gate.Suspected:
		return backup
	case decision.Advertisement == gate.Depreferred:
		return draining
	}
	return ready
}

// Route returns the route of a VIP by a decision.
func (all Policies) Route(v vip.VIP, decision gate.Decision) announce.Route {
	return all.of(v).route(decision)
}

func (policy *encoded) route(decision gate.Decision) announce.Route {
	route := announce.Route{Advertisement: decision.Advertisement}
	if policy != nil && decision.Advertisement != gate.Withdrawn {
		template := policy.attributes[stateOf(decision)][decision.Advertisement]
		route.Attributes, route.Prepend = template.encode(decision.Weight), template.prepend
	}
	return route
}

// Changes appends the routes that differ after decisions to a batch. A new reason alone is a new
// route only if the policy distinguishes it.
func (all Policies) Changes(batch []announce.Change, decided []gate.Change) []announce.Change {
	lookup := all.Lookup()
	for _, change := range decided {
		policy := lookup.of(change.VIP)
		if to := policy.route(change.To); to != policy.route(change.From) {
			batch = append(batch, announce.Change{VIP: change.VIP, Route: to})
		}
	}
	return batch
}

// Replaced appends the routes of VIPs that differ under the next policies to a batch.
func (all Policies) Replaced(
	batch []announce.Change, next Policies, vips []vip.VIP, decision func(vip.VIP) gate.Decision,
) []announce.Change {
	for _, v := range vips {
		if to := next.Route(v, decision(v)); to != all.Route(v, decision(v)) {
			batch = append(batch, announce.Change{VIP: v, Route: to})
		}
	}
	return batch
}
