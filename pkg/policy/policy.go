package policy

import (
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

// byState holds the attributes of a policy, by state and advertisement.
type byState [states][announce.Announced + 1]*template

// template encodes the attributes of a state.
type template struct {
	communities []uint32
	large       []announce.LargeCommunity
	// bandwidth is the link bandwidth of a ready target in bytes per second; 0 for none.
	bandwidth float32
	encoded   map[uint32]announce.Attributes // by weight, as far as used
}

// Policies are the policies of an attractor. The zero value has none. They are not safe for
// concurrent use.
type Policies struct {
	own    map[vip.VIP]*byState
	rest   *byState // of VIPs without a policy of their own; nil without one
	weighs bool
}

// Weigh reports whether attributes depend on the weights of decisions.
func (all Policies) Weigh() bool { return all.weighs }

// New returns the policies of a valid attractor.
func New(policies []trench.Policy) (all Policies, err error) {
	all.own = map[vip.VIP]*byState{}
	for i, policy := range policies {
		encoded := &byState{}
		for of, attributes := range [states]*trench.Attributes{
			&policy.Ready, policy.Draining, policy.Unknown, policy.Backup,
		} {
			if attributes == nil {
				attributes = &policy.Ready
			}
			all.weighs = all.weighs || attributes.TargetBandwidth > 0
			for _, advertisement := range []announce.Advertisement{announce.Depreferred, announce.Announced} {
				if encoded[of][advertisement], err = newTemplate(attributes, advertisement); err != nil {
					return Policies{}, fmt.Errorf("failed to encode policy %d: %w", i, err)
				}
			}
		}
		if len(policy.VIPs) == 0 {
			all.rest = encoded
		}
		for _, v := range policy.VIPs {
			all.own[v] = encoded
		}
	}
	return all, nil
}

// megabit is 1 Mbit/s in bytes per second, the unit of link bandwidths.
const megabit = 1e6 / 8

// newTemplate returns the communities for the announcer.
func newTemplate(attributes *trench.Attributes, advertisement announce.Advertisement) (*template, error) {
	all := &template{
		bandwidth: megabit * float32(attributes.TargetBandwidth), encoded: map[uint32]announce.Attributes{},
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
		large := slices.Clip(all.large)
		if weight > 0 {
			bits := math.Float32bits(float32(weight) * all.bandwidth)
			large = append(large, announce.LargeCommunity{trench.PolicyAS, trench.BandwidthFunction, bits})
		}
		encoded = announce.NewAttributes(all.communities, large)
		all.encoded[weight] = encoded
	}
	return encoded
}

// Route returns the route of a VIP by a decision.
func (all Policies) Route(v vip.VIP, decision gate.Decision) announce.Route {
	route := announce.Route{Advertisement: decision.Advertisement}
	encoded := all.own[v]
	if encoded == nil {
		encoded = all.rest
	}
	if encoded == nil || decision.Advertisement == gate.Withdrawn {
		return route
	}
	of := ready
	switch {
	case decision.Reason == gate.LBStale:
		of = unknown
	case decision.Reason == gate.LastResort:
		of = backup
	case decision.Advertisement == gate.Depreferred:
		of = draining
	}
	route.Attributes = encoded[of][decision.Advertisement].encode(decision.Weight)
	return route
}

// Changes appends the routes that differ after decisions to a batch. A new reason alone is a new
// route only if the policy distinguishes it.
func (all Policies) Changes(batch []announce.Change, decided []gate.Change) []announce.Change {
	for _, change := range decided {
		if to := all.Route(change.VIP, change.To); to != all.Route(change.VIP, change.From) {
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
