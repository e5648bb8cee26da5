package serving

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/vip"
)

// kernel is the confirmed kernel state. It is nil without a data plane: every target then counts as
// forwarded to.
type kernel struct {
	state plan.State
	// problems maps each VIP to its first problem.
	problems map[vip.VIP]*plan.Problem
	// drift maps VIPs, as text, to a description of their drift.
	drift map[string]string
	// revoked maps removed entries to the revision of the desired state that removes them. Until
	// the kernel confirms that revision they do not count, even if they are desired again.
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

// serves reports whether the kernel is confirmed to send new flows to a target of a stream.
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
	if k == nil {
		return ""
	}
	return k.state.Unreachable[a]
}

// able reports whether no known problem prevents forwarding to the stream.
func (k *kernel) able(stream string, f vip.Family) bool {
	if k == nil || k.state.Err != nil {
		return false
	}
	s, ok := k.state.Streams[stream]
	return ok && s.Problem[f] == ""
}

// Confirm applies a confirmed kernel state. Its cost follows the difference from the previous
// state, and the number of VIPs.
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
	k.drift = driftOfVIPs(state.Drift)
	for v := range differing(problemsBefore, k.problems) {
		e.roster.touch(v)
	}
	// Withheld families and an error are in the verdicts of all VIPs.
	all := before.Withheld != state.Withheld || fmt.Sprint(before.Err) != fmt.Sprint(state.Err)
	for i := range e.roster.vips {
		j := &e.roster.vips[i]
		installed := state.VIPs[j.VIP]
		if all || installed != j.installed {
			e.roster.touched.add(i)
		}
		j.installed = installed
	}
	resolved := map[string]bool{} // streams with revocations that the kernel confirmed
	for r, revision := range k.revoked {
		if revision <= state.Revision {
			delete(k.revoked, r)
			e.roster.touch(r.vip)
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
			e.roster.touchStream(s) // its problem may have changed
		}
		if able || resolved[name] || !same || (len(reached) > 0 && s.hasAny(reached)) {
			e.recount(s)
		}
	}
}

// driftOfVIPs returns the drift of the nftables map elements that belong to VIPs, by the text of
// the VIP. If a VIP has several, the last counts.
func driftOfVIPs(all []plan.Drift) map[string]string {
	of := map[string]string{}
	for _, x := range all {
		if rest, ok := strings.CutPrefix(x.Object, "element "); ok {
			if v, _, _ := strings.Cut(rest, " "); strings.Contains(v, "/") { // else it belongs to a target
				of[v] = x.Object + ": " + x.Detail
			}
		}
	}
	return of
}

// hasAny reports whether a target of the stream has one of the addresses.
func (s *stream) hasAny(addresses map[netip.Addr]bool) bool {
	return slices.ContainsFunc(s.members, func(m targetset.Member) bool {
		return slices.ContainsFunc(m.IPs, func(a netip.Addr) bool { return addresses[a] })
	})
}

// differing yields the keys that only one of two maps has, or whose values differ.
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
