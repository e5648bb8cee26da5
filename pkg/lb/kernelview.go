package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/vip"
)

// kernelView is what is known to be in the kernel, as the aggregate asks for it. A
// nil one is that of a load balancer without a data plane: nothing is asked of the
// kernel.
type kernelView struct {
	state dataplane.State
	// blamed are the VIPs that a problem names, with the first one that does.
	blamed map[vip.VIP]*dataplane.Problem
	// patient says that only checks take targets out: --on-sudden-loss=hold would
	// be of no use if the neighbor entries of all targets, which fail with their
	// network, took the targets out before.
	patient bool
	// doubts are what the data plane is to undo, with the revision of that:
	// what is known from before does not count, even if it is wanted again.
	doubts map[doubt]uint64
}

// doubt is about a target that was to serve no longer, or about a VIP that was to
// go nowhere.
type doubt struct {
	stream, target string
	family         vip.Family
	vip            vip.VIP
}

func (k *kernelView) doubted(d doubt) bool {
	if len(k.doubts) == 0 {
		return false
	}
	revision, known := k.doubts[d]
	return known && k.state.Revision < revision
}

// serves reports whether a target of a stream is known to get new flows.
func (k *kernelView) serves(stream string, f vip.Family, name string) bool {
	s := k.state.Streams[stream]
	if s == nil {
		return false
	}
	_, ok := s.Serving[f][name]
	return ok && !k.doubted(doubt{stream: stream, target: name, family: f})
}

// unreachable says why packets cannot get to an address; "" if they can.
func (k *kernelView) unreachable(a netip.Addr) string {
	if k == nil || k.patient {
		return ""
	}
	return k.state.Unreachable[a]
}

// able reports whether nothing is known to keep the stream from being forwarded.
func (k *kernelView) able(stream string, f vip.Family) bool {
	if k == nil || k.state.Err != nil {
		return false
	}
	s, ok := k.state.Streams[stream]
	return ok && s.Problem[f] == ""
}

// way is how packets of a VIP go.
type way struct {
	// open says that they go to a stream.
	open bool
	// only is the one of the VIP's streams that is to get them; "" for any of them.
	only string
}

func (w way) leadsTo(s *stream) bool { return w.only == "" || w.only == s.Name }

// way tells how packets of a VIP go, which these streams have. One that is still on
// its way from one stream to another is forwarded all the time.
func (k *kernelView) way(v vip.VIP, streams []*stream) way {
	if k == nil || len(streams) == 0 {
		return way{open: k == nil}
	}
	owner := owner(streams)
	name, ok := k.state.VIPs[v]
	if k.doubted(doubt{vip: v}) || k.state.Withheld[v.Family()] != "" {
		return way{only: owner}
	}
	moves := name != owner && k.state.Err == nil && k.blamed[v] == nil && k.serving(name, v.Family())
	return way{only: owner, open: ok && (name == owner || moves)}
}

// serving reports whether some target of a stream gets new flows.
func (k *kernelView) serving(stream string, f vip.Family) bool {
	s := k.state.Streams[stream]
	return s != nil && len(s.Serving[f]) > 0
}

// owner is the one of a VIP's streams that serves it in the kernel: that whose name
// sorts first.
func owner(streams []*stream) string {
	first := streams[0].Name
	for _, s := range streams[1:] {
		first = min(first, s.Name)
	}
	return first
}

// take gives a stream its members.
func (a *aggregate) take(s *stream, members []targetset.Member) {
	s.members, s.shadowed = members, nil
	if a.kernel == nil {
		return
	}
	// Members that leave come last, the one that stays longest first.
	seen := make(map[string]struct{}, len(members))
	for i := range members {
		if _, twice := seen[members[i].Name]; twice {
			if s.shadowed == nil {
				s.shadowed = map[int]struct{}{}
			}
			s.shadowed[i] = struct{}{}
		}
		seen[members[i].Name] = struct{}{}
	}
}

// confirm takes over what is in the kernel now. Its cost follows what differs, and
// the number of VIPs.
func (a *aggregate) confirm(state dataplane.State, touched vip.Set) {
	before := a.kernel
	a.kernel = &kernelView{state: state, patient: before.patient, doubts: before.doubts, blamed: map[vip.VIP]*dataplane.Problem{}}
	touch := func(v vip.VIP) {
		if a.configured.Has(v) {
			touched[v] = struct{}{}
		}
	}
	for i := range state.Problems {
		p := &state.Problems[i]
		for _, v := range p.VIPs {
			if a.kernel.blamed[v] == nil {
				a.kernel.blamed[v] = p
				touch(v)
			}
		}
	}
	for v := range before.blamed {
		touch(v)
	}
	for v, name := range state.VIPs {
		if before.state.VIPs[v] != name {
			touch(v)
		}
	}
	for v := range before.state.VIPs {
		if _, ok := state.VIPs[v]; !ok {
			touch(v)
		}
	}
	if before.state.Withheld != state.Withheld {
		for v := range a.configured {
			touched[v] = struct{}{}
		}
	}
	if text(before.state.Err) != text(state.Err) {
		for v, r := range a.current {
			if r.Reason == readinessv1.VipReason_VIP_REASON_DATA_PLANE {
				touched[v] = struct{}{}
			}
		}
	}
	resolved := map[string]struct{}{} // streams of which something is beyond doubt now
	for d, revision := range a.kernel.doubts {
		if revision > state.Revision {
			continue
		}
		delete(a.kernel.doubts, d)
		if d.stream == "" {
			touch(d.vip)
		}
		resolved[d.stream] = struct{}{}
	}
	reached := !maps.Equal(before.state.Unreachable, state.Unreachable)
	able := (before.state.Err == nil) != (state.Err == nil)
	for name, s := range a.streams {
		is, was := state.Streams[name], before.state.Streams[name]
		_, anew := resolved[name]
		if able || anew || !sameState(is, was) || (reached && reachedAnew(s, before.state.Unreachable, state.Unreachable)) {
			a.recount(s, touched)
		}
		if is != nil && was != nil && is.Problem != was.Problem {
			for _, v := range s.VIPs {
				touch(v)
			}
		}
	}
}

func sameState(a, b *dataplane.StreamState) bool {
	if a == nil || b == nil || a == b {
		return a == b
	}
	for f := range a.Serving {
		if !maps.Equal(a.Serving[f], b.Serving[f]) {
			return false
		}
	}
	return a.Problem == b.Problem
}

// reachedAnew reports whether an address of the stream can, or can no longer, be reached.
func reachedAnew(s *stream, before, now map[netip.Addr]string) bool {
	return slices.ContainsFunc(s.members, func(m targetset.Member) bool {
		return slices.ContainsFunc(m.IPs, func(a netip.Addr) bool { return before[a] != now[a] })
	})
}

// unforwarded says why the kernel does not forward a VIP although targets are ready.
func (a *aggregate) unforwarded(v vip.VIP) string {
	k, f := a.kernel, v.Family()
	s := a.streams[owner(a.serving[v])]
	d := "not confirmed by the kernel yet"
	switch st := k.state.Streams[s.Name]; {
	case k.state.Withheld[f] != "":
		d = k.state.Withheld[f]
	case k.blamed[v] != nil:
		d = k.blamed[v].Object + ": " + k.blamed[v].Detail
	case !s.enough(s.tallies[f].alive) && !s.enough(s.tallies[f].alive+s.tallies[f].leaving):
		d = fmt.Sprintf("of its streams only %s, whose name sorts first, is forwarded to; %s", s.Name, describe(s, s.tallies[f]))
	case st != nil && st.Problem[f] != "":
		d = fmt.Sprintf("stream %s: %s", s.Name, st.Problem[f])
	case k.state.Err != nil:
		d = k.state.Err.Error()
	default:
		for _, x := range k.state.Drift {
			if strings.HasPrefix(x.Object, "element "+v.String()+" ") {
				d = x.Object + ": " + x.Detail
			}
		}
	}
	if len(d) > maxDetail {
		d = d[:maxDetail-3] + "..."
	}
	return d
}

// forwardable is what the data plane is to do for a stream. before is what it was
// got last; nil for nothing.
func (a *aggregate) forwardable(s *stream, before *dataplane.Stream) *dataplane.Stream {
	d := &dataplane.Stream{
		Name: s.Name, VIPs: s.VIPs, Size: s.Maglev.Size, Seed: s.Maglev.Seed, DrainTime: s.DrainTime,
		Targets: make([]dataplane.Target, 0, len(s.members)),
	}
	for i := range s.members {
		if _, shadowed := s.shadowed[i]; shadowed {
			continue
		}
		m := &s.members[i]
		t := dataplane.Target{Name: m.Name, IPs: m.IPs}
		for f := range t.Roles {
			t.Roles[f] = dataplane.Down // unless it has an address
		}
		for _, ip := range m.IPs {
			f := vip.FamilyOf(ip)
			t.Roles[f] = a.role(s, m, ip, a.kernel.serves(s.Name, f, m.Name))
		}
		d.Targets = append(d.Targets, t)
	}
	moved(d, before)
	return d
}

// role is what a target is to do for the family of one of its addresses.
func (a *aggregate) role(s *stream, m *targetset.Member, ip netip.Addr, serves bool) dataplane.Role {
	h, known := a.healthOf(s, m, ip)
	t := &s.tallies[vip.FamilyOf(ip)]
	draining := m.Draining == healthcheck.Draining
	switch {
	case m.Draining == healthcheck.Drained || a.kernel.unreachable(ip) != "":
		return dataplane.Down
	case !known || h.State == healthcheck.Starting:
		return dataplane.Unknown
	case h.State == healthcheck.Ready || a.outages.Held(h.Key):
		switch {
		case !draining:
			return dataplane.Serving
		case !s.enough(t.alive) && s.enough(t.alive+t.leaving):
			return dataplane.Serving // no other target can take over
		case serves && !s.enough(t.ready) && s.enough(t.alive):
			return dataplane.Serving // until those that take over do
		}
		return dataplane.Draining
	case h.State == healthcheck.Overdue && draining:
		return dataplane.Draining
	case h.State == healthcheck.Overdue:
		// Who was not asked is not known to be dead, and the VIP is not ready anyway
		// if there are too many of them.
		return dataplane.Unknown
	}
	return dataplane.Down
}

// moved takes targets out that have other addresses than before until they are known
// to be alive there: what the kernel has of their names leads elsewhere.
func moved(d, before *dataplane.Stream) {
	if before == nil {
		return
	}
	var known map[string]*dataplane.Target
	for i := range d.Targets {
		t := &d.Targets[i]
		if i < len(before.Targets) && before.Targets[i].Name == t.Name && slices.Equal(before.Targets[i].IPs, t.IPs) {
			continue // nearly always
		}
		if known == nil {
			known = make(map[string]*dataplane.Target, len(before.Targets))
			for j := range before.Targets {
				known[before.Targets[j].Name] = &before.Targets[j]
			}
		}
		if was, ok := known[t.Name]; !ok || slices.Equal(was.IPs, t.IPs) {
			continue
		}
		for f := range t.Roles {
			if t.Roles[f] == dataplane.Unknown {
				t.Roles[f] = dataplane.Down
			}
		}
	}
}
