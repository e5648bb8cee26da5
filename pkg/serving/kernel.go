package serving

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/vip"
)

// kernel is what the kernel confirmed. A nil kernel is that of a load balancer without a data
// plane, which requires nothing of the kernel.
type kernel struct {
	state plan.State
	// problems has the first problem of each VIP.
	problems        map[vip.VIP]*plan.Problem
	ignoreNeighbors bool
	// revoked is what a desired state removes, with its revision. What the kernel confirmed of an
	// older revision does not count, even if it is desired again.
	revoked map[revocation]uint64
}

// revocation names a target that no longer serves, or a VIP that no stream serves.
type revocation struct {
	stream, target string
	family         vip.Family
	vip            vip.VIP
}

func (k *kernel) isRevoked(r revocation) bool {
	return len(k.revoked) > 0 && k.state.Revision < k.revoked[r]
}

// serves reports whether a target of a stream is known to get new flows.
func (k *kernel) serves(stream string, f vip.Family, target string) bool {
	return k == nil || k.state.Serves(stream, f, target) &&
		!k.isRevoked(revocation{stream: stream, target: target, family: f})
}

// serving reports whether some target of a stream gets new flows.
func (k *kernel) serving(stream string, f vip.Family) bool {
	s := k.state.Streams[stream]
	return s != nil && len(s.Serving[f]) > 0
}

// unreachable returns why packets cannot reach an address; "" if they can.
func (k *kernel) unreachable(a netip.Addr) string {
	if k == nil || k.ignoreNeighbors {
		return ""
	}
	return k.state.Unreachable[a]
}

// able reports whether nothing is known to prevent that the stream is forwarded.
func (k *kernel) able(stream string, f vip.Family) bool {
	if k == nil || k.state.Err != nil {
		return false
	}
	s, ok := k.state.Streams[stream]
	return ok && s.Problem[f] == ""
}

// Confirm takes over what the kernel confirmed. Its cost follows what differs from the state
// before, and the number of VIPs.
func (e *Evaluator) Confirm(state plan.State) {
	k := e.kernel
	before, problemsBefore := k.state, k.problems
	k.state, k.problems = state, map[vip.VIP]*plan.Problem{}
	for i := range state.Problems {
		for _, v := range state.Problems[i].VIPs {
			if k.problems[v] == nil {
				k.problems[v] = &state.Problems[i]
			}
		}
	}
	for v := range differing(problemsBefore, k.problems) {
		e.touch(v)
	}
	for v := range differing(before.VIPs, state.VIPs) {
		e.touch(v)
	}
	e.all = e.all || before.Withheld != state.Withheld || fmt.Sprint(before.Err) != fmt.Sprint(state.Err)
	resolved := map[string]bool{} // streams with revocations that the kernel confirmed
	for r, revision := range k.revoked {
		if revision <= state.Revision {
			delete(k.revoked, r)
			e.touch(r.vip)
			resolved[r.stream] = true
		}
	}
	reached := map[netip.Addr]bool{} // addresses that can, or can no longer, be reached
	for a := range differing(before.Unreachable, state.Unreachable) {
		reached[a] = true
	}
	able := (before.Err == nil) != (state.Err == nil)
	for name, s := range e.streams {
		same := state.Streams[name].Equal(before.Streams[name])
		if !same {
			e.touch(s.VIPs...) // its problem may be another one
		}
		if able || resolved[name] || !same || (len(reached) > 0 && s.hasAny(reached)) {
			e.dirty[s] = true
		}
	}
}

// hasAny reports whether a target of the stream has one of the addresses.
func (s *stream) hasAny(addresses map[netip.Addr]bool) bool {
	return slices.ContainsFunc(s.members, func(m targetset.Member) bool {
		return slices.ContainsFunc(m.IPs, func(a netip.Addr) bool { return addresses[a] })
	})
}

// differing yields the keys that only one of two maps has, or that have another value.
func differing[K, V comparable](a, b map[K]V) iter.Seq[K] {
	return func(yield func(K) bool) {
		for k, x := range a {
			if y, ok := b[k]; (!ok || x != y) && !yield(k) {
				return
			}
		}
		for k := range b {
			if _, ok := a[k]; !ok && !yield(k) {
				return
			}
		}
	}
}
