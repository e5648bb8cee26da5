package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// byState returns the attributes of a policy; nil for a state that has those of ready.
func byState(policy *trench.Policy) [states]*trench.Attributes {
	return [states]*trench.Attributes{&policy.Ready, policy.Draining, policy.Unknown, policy.Backup}
}

func text(attributes *trench.Attributes) string {
	var parts []string
	if len(attributes.Communities) > 0 {
		parts = append(parts, "communities "+strings.Join(attributes.Communities, " "))
	}
	add := func(name string, value int64) {
		if value > 0 {
			parts = append(parts, fmt.Sprint(name, " ", value))
		}
	}
	add("MED", attributes.MED)
	add("prepend", int64(attributes.Prepend))
	add("LOCAL_PREF", attributes.LocalPreference)
	if attributes.TargetBandwidth > 0 {
		parts = append(parts, fmt.Sprintf("%d Mbit/s per ready target", attributes.TargetBandwidth))
	}
	return cmp.Or(strings.Join(parts, ", "), "no attributes")
}

const maxNamed = 3

// counted returns the number of VIPs with the first ones.
func counted(vips []vip.VIP, count int) string {
	first := vip.Texts(vips[:min(len(vips), maxNamed)])
	if count == 1 {
		return "VIP " + first[0]
	}
	if count > len(first) {
		first = append(first, "…")
	}
	return fmt.Sprintf("%d VIPs (%s)", count, strings.Join(first, ", "))
}

// Describe returns the policies of an attractor as lines.
func Describe(policies []trench.Policy) (lines []string) {
	for i, policy := range policies {
		vips := "all VIPs that no other policy has"
		if len(policy.VIPs) > 0 {
			vips = counted(policy.VIPs, len(policy.VIPs))
		}
		lines = append(lines, fmt.Sprintf("policy %d of %s", i, vips))
		for of, attributes := range byState(&policy) {
			if attributes != nil {
				lines = append(lines, fmt.Sprintf("  %s: %s", names[of], text(attributes)))
			}
		}
	}
	return lines
}

// Use returns the index and the state of the policy that is in use for a VIP. The state is empty if
// the VIP has no policy or is withdrawn.
func (all Policies) Use(v vip.VIP, decision gate.Decision) (index int, state string) {
	policy := all.of(v)
	if policy == nil || decision.Advertisement == gate.Withdrawn {
		return 0, ""
	}
	return policy.index, names[stateOf(decision)]
}

// Cause names the policy and the attributes that a decision gives to a VIP, or "" if the decision
// does not change them. It does not allocate: decisions change many VIPs.
func (lookup *Lookup) Cause(change gate.Change) string {
	policy := lookup.of(change.VIP)
	if policy == nil || change.To.Advertisement == gate.Withdrawn {
		return ""
	}
	to := stateOf(change.To)
	if change.From.Advertisement != gate.Withdrawn && policy.texts[to] == policy.texts[stateOf(change.From)] {
		return ""
	}
	return policy.causes[to]
}

// edit is a change of attributes by an edit of the policies.
type edit struct {
	from, to string
	count    int
	first    []vip.VIP
}

// maxEdits is the number of different changes that [Policies.Edit] describes.
const maxEdits = 3

// Edit describes the changes of routes from all to the next policies, of most VIPs first.
func (all Policies) Edit(next Policies, changes []announce.Change, decision func(vip.VIP) gate.Decision) string {
	var edits []*edit
	known := map[[2]string]*edit{}
	for _, change := range changes {
		state := stateOf(decision(change.VIP))
		texts := [2]string{all.of(change.VIP).attributesIn(state), next.of(change.VIP).attributesIn(state)}
		same := known[texts]
		if same == nil {
			same = &edit{from: texts[0], to: texts[1]}
			known[texts], edits = same, append(edits, same)
		}
		if same.count++; len(same.first) < maxNamed {
			same.first = append(same.first, change.VIP)
		}
	}
	slices.SortStableFunc(edits, func(a, b *edit) int { return b.count - a.count })
	var parts []string
	rest := len(changes)
	for _, same := range edits[:min(len(edits), maxEdits)] {
		parts = append(parts, fmt.Sprintf("%s from %s to %s", counted(same.first, same.count), same.from, same.to))
		rest -= same.count
	}
	if rest > 0 {
		parts = append(parts, fmt.Sprintf("%d other VIPs", rest))
	}
	return "routing policy changed: " + strings.Join(parts, "; ")
}

func (policy *encoded) attributesIn(state state) string {
	if policy == nil {
		return "no policy"
	}
	return policy.texts[state]
}
