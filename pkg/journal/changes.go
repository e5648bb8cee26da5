package journal

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// MaxSingle is the largest number of VIPs of one decision that have a log line and an event each.
	// A larger decision has one log line and one event, because logging 10 000 lines takes as long as
	// the decision. At level debug each VIP has a line.
	MaxSingle = 50
	// maxFirstVIPs and maxDescribed bound the VIPs and the transitions that the text of a larger
	// decision names; the rest is counted.
	maxFirstVIPs, maxDescribed = 5, 5
	// maxDetails bounds the details of a decision, which has one detail for each failed stream.
	// Further VIPs have no detail. Decisions with up to MaxSingle changes keep all of them.
	maxDetails = MaxSingle
)

// Unknown and Removed are the states before the first and after the last decision about a VIP.
const (
	Unknown = "unknown"
	Removed = "removed"
)

// Transition is a change that several VIPs of one decision share. States and reasons are the words
// of log lines and metric labels.
type Transition struct {
	Family           vip.Family
	From, To, Reason string
	// New reports whether the transition is an event even if the state does not change: the first
	// decision about the VIPs, or another one that changes their path attributes.
	New bool
}

// Changed reports whether the state changed, and not only its reason.
func (transition Transition) Changed() bool { return transition.From != transition.To }

// Notable reports whether the transition is an event.
func (transition Transition) Notable() bool { return transition.New || transition.Changed() }

// Changes collects the transitions of one decision.
type Changes struct {
	members []member
	groups  []group
	index   map[explained]uint16 // of groups
	details int                  // distinct details in groups
}

type explained struct {
	Transition
	detail string
}

// group counts the VIPs with the same transition and cause.
type group struct {
	explained
	count int
}

type member struct {
	vip   vip.VIP
	group uint16
}

func compareMembers(first, second member) int { return vip.Compare(first.vip, second.vip) }

// Add adds a VIP. The order of VIPs does not matter.
func (changes *Changes) Add(prefix vip.VIP, transition Transition, detail string) {
	key, index := explained{transition, detail}, uint16(0)
	// Adjacent VIPs often have the same transition and detail, so that the map is rarely needed.
	if count := len(changes.members); count > 0 && changes.groups[changes.members[count-1].group].explained == key {
		index = changes.members[count-1].group
	} else {
		index = changes.groupOf(key)
	}
	changes.groups[index].count++
	changes.members = append(changes.members, member{prefix, index})
}

// groupOf returns the index of a group, which it adds if necessary.
func (changes *Changes) groupOf(key explained) uint16 {
	index, known := changes.index[key]
	// Beyond the bound, VIPs share the group without a detail.
	if !known && key.detail != "" {
		if changes.details++; changes.details > maxDetails {
			key.detail = ""
			index, known = changes.index[key]
		}
	}
	if !known {
		index = uint16(len(changes.groups))
		changes.index[key] = index
		changes.groups = append(changes.groups, group{explained: key})
	}
	return index
}

// reset removes all VIPs and keeps the memory.
func (changes *Changes) reset() *Changes {
	changes.members, changes.groups, changes.details = changes.members[:0], changes.groups[:0], 0
	clear(changes.index)
	return changes
}

// byTransition merges groups that differ only in their detail, and keeps that of the first VIP.
func byTransition(groups []group) (merged []group) {
	for _, part := range groups {
		same := func(other group) bool { return other.Transition == part.Transition }
		if i := slices.IndexFunc(merged, same); i >= 0 {
			merged[i].count += part.count
		} else {
			merged = append(merged, part)
		}
	}
	return merged
}

type summary struct {
	count            int
	first            []string // VIPs
	transitions      []*adminv1.VipTransitions
	from, to, reason string // words that all transitions share; "" for words that differ
}

// summarize returns the summary of the transitions that include accepts.
func (changes *Changes) summarize(include func(Transition) bool) (all summary) {
	// Record has sorted the members, so these are the lowest VIPs.
	for _, member := range changes.members {
		if len(all.first) == maxFirstVIPs {
			break
		}
		if include(changes.groups[member.group].Transition) {
			all.first = append(all.first, member.vip.String())
		}
	}
	for _, part := range byTransition(changes.groups) {
		if !include(part.Transition) {
			continue
		}
		// A word is common until a transition differs.
		if all.count == 0 {
			all.from, all.to, all.reason = part.From, part.To, part.Reason
		}
		all.count += part.count
		for _, word := range []struct {
			common *string
			is     string
		}{{&all.from, part.From}, {&all.to, part.To}, {&all.reason, part.Reason}} {
			if *word.common != word.is {
				*word.common = ""
			}
		}
		all.transitions = append(all.transitions, &adminv1.VipTransitions{
			Count: uint32(part.count), Family: part.Family.String(), Detail: part.detail,
			From: part.From, To: part.To, Reason: part.Reason,
		})
	}
	// Largest first, because describe and tables truncate the end.
	slices.SortStableFunc(all.transitions, func(first, second *adminv1.VipTransitions) int {
		return int(second.GetCount()) - int(first.GetCount())
	})
	return all
}

// describe returns the transitions as text, largest first.
func (all *summary) describe() string {
	var parts []string
	described := 0
	for _, transition := range all.transitions[:min(len(all.transitions), maxDescribed)] {
		text := fmt.Sprintf("%d %s %s to %s",
			transition.GetCount(), transition.GetFamily(), transition.GetFrom(), transition.GetTo())
		if transition.GetReason() != "" {
			text += ", " + transition.GetReason()
		}
		if transition.GetDetail() != "" {
			text += " (" + transition.GetDetail() + ")"
		}
		parts = append(parts, text)
		described += int(transition.GetCount())
	}
	if more := all.count - described; more > 0 {
		parts = append(parts, fmt.Sprintf("%d others", more))
	}
	return strings.Join(parts, "; ")
}

// attributes returns the attributes of the log line. Common words have the same attributes as in
// the lines of single VIPs.
func (all *summary) attributes() []any {
	attributes := []any{"count", all.count}
	for _, word := range [][2]string{{"from", all.from}, {"to", all.to}, {"reason", all.reason}} {
		if word[1] != "" {
			attributes = append(attributes, word[0], word[1])
		}
	}
	return append(attributes, "transitions", all.describe(), "vips", all.first)
}

// event returns the decision's event. Its detail begins with the VIPs: a table truncates the end.
func (all *summary) event() *adminv1.Event {
	names := strings.Join(all.first, ", ")
	if more := all.count - len(all.first); more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	return &adminv1.Event{
		Object: fmt.Sprint(all.count, " VIPs"), From: all.from, To: cmp.Or(all.to, "changed"), Reason: all.reason,
		Detail: names + ": " + all.describe(), VipCount: uint32(all.count), FirstVips: all.first,
		Transitions: all.transitions,
	}
}
