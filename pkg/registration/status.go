package registration

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/logs"
)

// Status returns one entry for each name whose last lookup failed, and then the registration at
// each load balancer, sorted by address.
func (g *Group) Status() []*targetadminv1.Registration {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []*targetadminv1.Registration
	for _, a := range g.Registries {
		n := g.names[a.String()]
		if a.fixed() || n.err == nil && len(n.addresses) > 0 {
			continue
		}
		r := g.describe(a)
		r.Error = cmp.Or(logs.Text(n.err), "the first lookup has not ended")
		if len(n.addresses) > 0 {
			r.State = "LOOKUP FAILED"
		}
		all = append(all, r)
	}
	for _, address := range slices.Sorted(maps.Keys(g.members)) {
		m := g.members[address]
		r := g.describe(m.from)
		m.State().write(r)
		r.Lb = address
		all = append(all, r)
	}
	return all
}

// describe returns a Registration with the fields that do not depend on the load balancer.
func (g *Group) describe(from Address) *targetadminv1.Registration {
	t := g.Request.GetTargets()[0]
	return &targetadminv1.Registration{
		Stream: g.Request.GetStream(), Name: t.GetName(), Addresses: t.GetAddresses(), Registry: from.String(),
	}
}

// write writes the state into a registration. In the phases Registered and Leaving it writes the
// states that the load balancer reported for the target's addresses.
func (s State) write(r *targetadminv1.Registration) {
	r.Since, r.Failures, r.Error = timestamppb.New(s.Since), s.Failures, logs.Text(s.Err)
	switch s.Phase {
	case Registered, Leaving:
		var states []string
		var since *timestamppb.Timestamp
		for _, t := range s.Targets {
			states = append(states, strings.TrimPrefix(t.GetState().String(), "STATE_"))
			if t.GetState() != targetv1.State_STATE_READY {
				r.Error = cmp.Or(r.Error, t.GetLastError())
			}
			if since == nil || t.GetSince().AsTime().After(since.AsTime()) {
				since = t.GetSince()
			}
		}
		r.Since = cmp.Or(since, r.Since)
		r.State = strings.Join(slices.Compact(states), ", ")
	case Removed:
		r.Error = "removed by another client"
	}
}
