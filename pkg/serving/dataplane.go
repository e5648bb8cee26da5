package serving

import (
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// planStream returns the desired data plane state of a stream; before is the previous one, or nil.
func (evaluator *Evaluator) planStream(stream *stream, before *plan.Stream) *plan.Stream {
	desired := &plan.Stream{
		Name: stream.Name, VIPs: stream.VIPs, Size: stream.Maglev.Size, Seed: stream.Maglev.Seed, DrainTime: stream.DrainTime,
		Match: ports(stream.Match), Targets: make([]plan.Target, 0, len(stream.members)),
		RouteAll: stream.Check.Via.ToVIP(true), Prepare: stream.prepare, Earlier: earlier(stream.Earlier),
	}
	for i := range stream.members {
		member := &stream.members[i]
		// Down is the role of a family without an address.
		target := plan.Target{Name: stream.names[i], IPs: member.IPs, Roles: [...]plan.Role{plan.Down, plan.Down}}
		for _, ip := range member.IPs {
			target.Roles[vip.FamilyOf(ip)] = evaluator.role(stream, i, ip)
		}
		desired.Targets = append(desired.Targets, target)
	}
	drainMoved(desired, before)
	return desired
}

// earlier returns sets of targets with sorted names, which both families have.
func earlier(generations []trench.Generation) (sets [][len(vip.Families)][]string) {
	for _, generation := range generations {
		names := slices.Compact(slices.Sorted(slices.Values(generation.Targets)))
		sets = append(sets, [...][]string{names, names})
	}
	return sets
}

// protocols maps the protocol names of the trench file to IP protocol numbers.
var protocols = map[string]uint8{"tcp": plan.TCP, "udp": plan.UDP, "sctp": plan.SCTP}

// ports returns the ports of a match, sorted; nil for none.
func ports(match []trench.Match) (list []plan.Port) {
	for _, m := range match {
		for _, protocol := range m.Protocols {
			for _, port := range m.Ports {
				list = append(list, plan.Port{Protocol: protocols[protocol], Number: port})
			}
		}
	}
	slices.SortFunc(list, plan.ComparePorts)
	return list
}

// role returns the role of the member with an index for the family of one of its addresses.
func (evaluator *Evaluator) role(stream *stream, index int, ip netip.Addr) plan.Role {
	member := &stream.members[index]
	family := vip.FamilyOf(ip)
	counts := &stream.tallies[family]
	health, known := evaluator.healthOf(stream, member, ip)
	draining := member.Draining == healthcheck.Draining
	switch {
	case member.Draining == healthcheck.Drained || evaluator.kernel.unreachable(ip) != "":
		return plan.Down
	case !known || health.State == healthcheck.Starting:
		return plan.Unknown
	case health.State == healthcheck.Ready:
		switch {
		case stream.settles(family) && !evaluator.kernel.serving(stream.Name, family):
			return plan.Unknown // all targets enter the table together
		case !draining:
			return plan.Serving
		case !stream.enough(counts.alive) && stream.enough(counts.alive+counts.leaving):
			return plan.Serving // no other target can take over
		case evaluator.kernel.serves(stream.Name, family, stream.names[index]) && !stream.enough(counts.ready) &&
			stream.enough(counts.alive):
			return plan.Serving // until the kernel serves its replacements
		}
		return plan.Draining
	case health.State == healthcheck.Overdue && draining:
		return plan.Draining
	case health.State == healthcheck.Overdue:
		// An overdue target may be alive, and too many of them make the VIP not ready anyway.
		return plan.Unknown
	case stream.LastResort == trench.Depreferred && !draining && counts.alive+counts.leaving == 0:
		return plan.Serving // no target passes its checks
	}
	return plan.Down
}

// drainMoved replaces the role Unknown by Draining for targets whose addresses changed: until a check
// passes at the new addresses they get no new flows. Flows that another target had there stay.
func drainMoved(desired, before *plan.Stream) {
	var old map[string]*plan.Target
	for i := range desired.Targets {
		target := &desired.Targets[i]
		if !slices.Contains(target.Roles[:], plan.Unknown) {
			continue // nearly always
		}
		if old == nil {
			old = byName(before)
		}
		if was := old[target.Name]; was == nil || slices.Equal(was.IPs, target.IPs) {
			continue
		}
		for f, role := range target.Roles {
			if role == plan.Unknown {
				target.Roles[f] = plan.Draining
			}
		}
	}
}

// byName returns the targets of a stream by name; an empty map for a nil stream.
func byName(stream *plan.Stream) map[string]*plan.Target {
	targets := map[string]*plan.Target{}
	for i := 0; stream != nil && i < len(stream.Targets); i++ {
		targets[stream.Targets[i].Name] = &stream.Targets[i]
	}
	return targets
}

// keepsServing reports whether a serving target continues to serve; a nil target does not.
func keepsServing(t *plan.Target, f vip.Family) bool {
	return t != nil && (t.Roles[f] == plan.Serving || t.Roles[f] == plan.Unknown)
}

// continues reports whether a target that the kernel forwards to continues to serve in a stream.
func (kernel *kernel) continues(stream *plan.Stream, family vip.Family) bool {
	key := continuation{stream, family}
	does, known := kernel.continuing[key]
	if !known && stream != nil {
		does = slices.ContainsFunc(stream.Targets, func(t plan.Target) bool {
			return keepsServing(&t, family) && kernel.serves(stream.Name, family, t.Name)
		})
		kernel.continuing[key] = does
	}
	return does
}

// ownersOf returns the stream that serves each VIP. If several streams list it, the one whose name
// sorts first serves it.
func ownersOf(streams map[string]*plan.Stream) map[vip.VIP]string {
	owners := map[vip.VIP]string{}
	for name, s := range streams {
		for _, v := range s.VIPs {
			if by, known := owners[v]; !known || name < by {
				owners[v] = name
			}
		}
	}
	return owners
}
