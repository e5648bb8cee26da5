package policy

import (
	"fmt"

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
type byState [states][announce.Announced + 1]announce.Attributes

// Policies are the policies of an attractor. The zero value has none.
type Policies struct {
	own  map[vip.VIP]*byState
	rest *byState // of VIPs without a policy of their own; nil without one
}

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
			for _, advertisement := range []announce.Advertisement{announce.Depreferred, announce.Announced} {
				if encoded[of][advertisement], err = encode(attributes, advertisement); err != nil {
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

// encode returns the communities for the announcer.
func encode(attributes *trench.Attributes, advertisement announce.Advertisement) (announce.Attributes, error) {
	var communities []uint32
	var large []announce.LargeCommunity
	if advertisement == announce.Depreferred {
		communities = append(communities, announce.GracefulShutdown)
	}
	for _, text := range attributes.Communities {
		community, ok := trench.ParseCommunity(text)
		switch {
		case !ok:
			return "", fmt.Errorf("%q is no community", text)
		case len(community) == 2:
			communities = append(communities, community[0]<<16|community[1])
		default:
			large = append(large, announce.LargeCommunity(community))
		}
	}
	carry := func(function uint32, value int64) {
		if value > 0 {
			large = append(large, announce.LargeCommunity{trench.PolicyAS, function, uint32(value)})
		}
	}
	carry(trench.MEDFunction, attributes.MED)
	carry(trench.PrependFunction, int64(attributes.Prepend))
	carry(trench.PreferenceFunction, attributes.LocalPreference)
	return announce.NewAttributes(communities, large)
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
	route.Attributes = encoded[of][decision.Advertisement]
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
