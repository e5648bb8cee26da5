package serving

import (
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// planStream returns the desired data plane state of a stream. before is the previous one; nil if
// there was none.
func (e *Evaluator) planStream(s *stream, before *plan.Stream) *plan.Stream {
	d := &plan.Stream{
		Name: s.Name, VIPs: s.VIPs, Size: s.Maglev.Size, Seed: s.Maglev.Seed, DrainTime: s.DrainTime,
		Match: ports(s.Match), Targets: make([]plan.Target, 0, len(s.members)), RouteAll: s.Check.Via.ToVIP(true),
	}
	for i := range s.members {
		if s.shadowed[i] {
			continue
		}
		m := &s.members[i]
		// Down is the role of a family without an address.
		t := plan.Target{Name: m.Name, IPs: m.IPs, Roles: [...]plan.Role{plan.Down, plan.Down}}
		for _, ip := range m.IPs {
			t.Roles[vip.FamilyOf(ip)] = e.role(s, m, ip)
		}
		d.Targets = append(d.Targets, t)
	}
	disableMoved(d, before)
	return d
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

// role returns the role of a target for the family of one of its addresses.
func (e *Evaluator) role(s *stream, m *targetset.Member, ip netip.Addr) plan.Role {
	f := vip.FamilyOf(ip)
	t := &s.tallies[f]
	h, known := e.healthOf(s, m, ip)
	draining := m.Draining == healthcheck.Draining
	switch {
	case m.Draining == healthcheck.Drained || e.kernel.unreachable(ip) != "":
		return plan.Down
	case !known || h.State == healthcheck.Starting:
		return plan.Unknown
	case h.State == healthcheck.Ready:
		switch {
		case s.settles(f) && !e.kernel.serving(s.Name, f):
			return plan.Unknown // all targets enter the table together
		case !draining:
			return plan.Serving
		case !s.enough(t.alive) && s.enough(t.alive+t.leaving):
			return plan.Serving // no other target can take over
		case e.kernel.serves(s.Name, f, m.Name) && !s.enough(t.ready) && s.enough(t.alive):
			return plan.Serving // until the kernel serves its replacements
		}
		return plan.Draining
	case h.State == healthcheck.Overdue && draining:
		return plan.Draining
	case h.State == healthcheck.Overdue:
		// An overdue target may be alive, and too many of them make the VIP not ready anyway.
		return plan.Unknown
	}
	return plan.Down
}

// disableMoved replaces the role Unknown by Down for targets whose addresses changed: until a check
// passes at the new addresses, kernel entries with the target's name lead to the old ones.
func disableMoved(d, before *plan.Stream) {
	var old map[string]*plan.Target
	for i := range d.Targets {
		t := &d.Targets[i]
		if !slices.Contains(t.Roles[:], plan.Unknown) {
			continue // nearly always
		}
		if old == nil {
			old = byName(before)
		}
		if was := old[t.Name]; was == nil || slices.Equal(was.IPs, t.IPs) {
			continue
		}
		for f, role := range t.Roles {
			t.Roles[f] = max(role, plan.Down) // all but Unknown stay
		}
	}
}

// byName returns the targets of a stream by name; an empty map for a nil stream.
func byName(s *plan.Stream) map[string]*plan.Target {
	targets := map[string]*plan.Target{}
	for i := 0; s != nil && i < len(s.Targets); i++ {
		targets[s.Targets[i].Name] = &s.Targets[i]
	}
	return targets
}

// keepsServing reports whether a serving target continues to serve; a nil target does not.
func keepsServing(t *plan.Target, f vip.Family) bool {
	return t != nil && (t.Roles[f] == plan.Serving || t.Roles[f] == plan.Unknown)
}

// continues reports whether a target that the kernel forwards to continues to serve in a stream.
func (k *kernel) continues(s *plan.Stream, f vip.Family) bool {
	return s != nil && slices.ContainsFunc(s.Targets, func(t plan.Target) bool {
		return keepsServing(&t, f) && k.serves(s.Name, f, t.Name)
	})
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
