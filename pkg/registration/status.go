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
func (group *Group) Status() []*targetadminv1.Registration {
	group.mu.Lock()
	defer group.mu.Unlock()
	var all []*targetadminv1.Registration
	for _, entry := range group.Registries {
		found := group.names[entry.String()]
		if entry.fixed() || found.err == nil && len(found.addresses) > 0 {
			continue
		}
		status := group.describe(entry)
		status.Error = cmp.Or(logs.Text(found.err), "the first lookup has not ended")
		if len(found.addresses) > 0 {
			status.State = "LOOKUP FAILED"
		}
		all = append(all, status)
	}
	for _, address := range slices.Sorted(maps.Keys(group.members)) {
		member := group.members[address]
		status := group.describe(member.from)
		member.State().write(status)
		status.Lb = address
		all = append(all, status)
	}
	return all
}

// describe returns a Registration with the fields that do not depend on the load balancer.
func (group *Group) describe(from Address) *targetadminv1.Registration {
	target := group.Request.GetTargets()[0]
	return &targetadminv1.Registration{
		Stream: group.Request.GetStream(), Name: target.GetName(), Addresses: target.GetAddresses(),
		Registry: from.String(),
	}
}

// write writes the state into a registration. In the phases Registered and Leaving it writes the
// states that the load balancer reported for the target's addresses.
func (state State) write(status *targetadminv1.Registration) {
	status.Since, status.Failures, status.Error = timestamppb.New(state.Since), state.Failures, logs.Text(state.Err)
	switch state.Phase {
	case Registered, Leaving:
		var states []string
		var since *timestamppb.Timestamp
		for _, target := range state.Targets {
			states = append(states, strings.TrimPrefix(target.GetState().String(), "STATE_"))
			if target.GetState() != targetv1.State_STATE_READY {
				status.Error = cmp.Or(status.Error, target.GetLastError())
			}
			if since == nil || target.GetSince().AsTime().After(since.AsTime()) {
				since = target.GetSince()
			}
		}
		status.Since = cmp.Or(since, status.Since)
		status.State = strings.Join(slices.Compact(states), ", ")
	case Removed:
		status.Error = "removed by another client"
	}
}
