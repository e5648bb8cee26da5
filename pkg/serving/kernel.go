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

// kernel is the confirmed kernel state; nil without a data plane: it forwards to every target.
type kernel struct {
	state plan.State
	// problems maps each VIP to its first problem.
	problems map[vip.VIP]*plan.Problem
	// drift maps VIPs, as text, to a description of their drift.
	drift map[string]string
	// revoked maps removed entries to the revision of the desired state that removes them. Until
	// the kernel confirms that revision they do not count, even if they are desired again.
	revoked map[revocation]uint64
	// renamed maps targets, without a family, to their confirmed names: the kernel keeps forwarding to
	// their addresses until it confirms the new names.
	renamed map[revocation]renaming
	// continuing caches the results of continues for the VIPs of one Forward.
	continuing map[continuation]bool
}

// continuation is one family of a desired state of a stream.
type continuation struct {
	stream *plan.Stream
	family vip.Family
}

// renaming is the confirmed name of a target, and the revision of the desired state with the new
// one; 0 before that is sent.
type renaming struct {
	from     string
	revision uint64
}

// rename notes the targets of a stream that have new names and the addresses of old ones.
func (kernel *kernel) rename(name string, old, next *stream) {
	if kernel == nil || old == nil {
		return
	}
	names := make(map[netip.Addr]string, len(old.members))
	for i := range old.members {
		names[old.members[i].IPs[0]] = old.names[i]
	}
	for i := range next.members {
		was, known := names[next.members[i].IPs[0]]
		if !known || was == next.names[i] {
			continue
		}
		// The previous renaming may not be confirmed yet.
		if before, pending := kernel.renamed[revocation{stream: name, target: was}]; pending {
			was = before.from
		}
		kernel.renamed[revocation{stream: name, target: next.names[i]}] = renaming{from: was}
	}
}

// revocation names a target that no longer serves, or a VIP that no stream serves.
type revocation struct {
	stream, target string
	family         vip.Family
	vip            vip.VIP
}

func (kernel *kernel) isRevoked(r revocation) bool {
	return len(kernel.revoked) > 0 && kernel.state.Revision < kernel.revoked[r]
}

// serves reports whether the kernel is confirmed to send new flows to a target of a stream.
func (kernel *kernel) serves(stream string, family vip.Family, target string) bool {
	if kernel == nil || kernel.state.Serves(stream, family, target) &&
		!kernel.isRevoked(revocation{stream: stream, target: target, family: family}) {
		return true
	}
	before, renamed := kernel.renamed[revocation{stream: stream, target: target}]
	return renamed && kernel.state.Serves(stream, family, before.from)
}

// serving reports whether some target of a stream gets new flows.
func (kernel *kernel) serving(stream string, family vip.Family) bool {
	s := kernel.state.Streams[stream]
	return s != nil && len(s.Serving[family]) > 0
}

// unreachable returns why packets cannot reach an address; "" if they can.
func (kernel *kernel) unreachable(address netip.Addr) string {
	if kernel == nil {
		return ""
	}
	return kernel.state.Unreachable[address]
}

// able reports whether no known problem prevents forwarding to the stream.
func (kernel *kernel) able(stream string, family vip.Family) bool {
	if kernel == nil || kernel.state.Err != nil {
		return false
	}
	s, ok := kernel.state.Streams[stream]
	return ok && s.Problem[family] == ""
}

// Confirm applies a confirmed kernel state. Its cost follows the difference from the previous
// state, and the number of VIPs.
func (evaluator *Evaluator) Confirm(state plan.State) {
	kernel := evaluator.kernel
	before, problemsBefore := kernel.state, kernel.problems
	kernel.state, kernel.problems = state, map[vip.VIP]*plan.Problem{}
	for i := range state.Problems {
		for _, v := range state.Problems[i].VIPs {
			if kernel.problems[v] == nil {
				kernel.problems[v] = &state.Problems[i]
			}
		}
	}
	kernel.drift = driftOfVIPs(state.Drift)
	for v := range differing(problemsBefore, kernel.problems) {
		evaluator.roster.touch(v)
	}
	// Withheld families and an error are in the verdicts of all VIPs.
	all := before.Withheld != state.Withheld || fmt.Sprint(before.Err) != fmt.Sprint(state.Err)
	for i := range evaluator.roster.vips {
		entry := &evaluator.roster.vips[i]
		installed := state.VIPs[entry.VIP]
		if all || installed != entry.installed {
			evaluator.roster.touched.add(i)
		}
		entry.installed = installed
	}
	resolved := map[string]bool{} // streams with revocations that the kernel confirmed
	for revoked, revision := range kernel.revoked {
		if revision <= state.Revision {
			delete(kernel.revoked, revoked)
			evaluator.roster.touch(revoked.vip)
			resolved[revoked.stream] = true
		}
	}
	for target, renaming := range kernel.renamed {
		if renaming.revision > 0 && renaming.revision <= state.Revision {
			delete(kernel.renamed, target)
			resolved[target.stream] = true
		}
	}
	reached := map[netip.Addr]bool{} // addresses that can, or can no longer, be reached
	for a := range differing(before.Unreachable, state.Unreachable) {
		reached[a] = true
	}
	able := (before.Err == nil) != (state.Err == nil)
	for name, stream := range evaluator.streams {
		same := state.Streams[name].Equal(before.Streams[name])
		if !same {
			evaluator.roster.touchStream(stream) // its problem may have changed
		}
		if able || resolved[name] || !same || (len(reached) > 0 && stream.hasAny(reached)) {
			evaluator.recount(stream)
		}
	}
}

// driftOfVIPs returns the drift of the nftables map elements that belong to VIPs, by the text of
// the VIP. If a VIP has several, the last counts.
func driftOfVIPs(all []plan.Drift) map[string]string {
	of := map[string]string{}
	for _, drift := range all {
		if rest, ok := strings.CutPrefix(drift.Object, "element "); ok {
			if v, _, _ := strings.Cut(rest, " "); strings.Contains(v, "/") { // else it belongs to a target
				of[v] = drift.Object + ": " + drift.Detail
			}
		}
	}
	return of
}

// hasAny reports whether a target of the stream has one of the addresses.
func (stream *stream) hasAny(addresses map[netip.Addr]bool) bool {
	return slices.ContainsFunc(stream.members, func(m targetset.Member) bool {
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
