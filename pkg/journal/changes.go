package journal

import (
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
	// New reports whether this is the first decision about the VIPs. It is an event, even if the state
	// does not change.
	New bool
}

// Changed reports whether the state changed, and not only its reason.
func (t Transition) Changed() bool { return t.From != t.To }

// Notable reports whether the transition is an event.
func (t Transition) Notable() bool { return t.New || t.Changed() }

// Changes collects the transitions of one decision.
type Changes struct {
	members []member
	groups  []group
	index   map[explained]uint16 // of groups
	details int                  // distinct details in groups
}

// explained is a transition with its cause.
type explained struct {
	Transition
	detail string
}

// group counts the VIPs with the same transition and cause.
type group struct {
	explained
	count int
}

// member is a VIP and the index of its group.
type member struct {
	vip   vip.VIP
	group uint16
}

func compareMembers(a, b member) int { return vip.Compare(a.vip, b.vip) }

// Add adds a VIP. The order of VIPs does not matter.
func (c *Changes) Add(v vip.VIP, transition Transition, detail string) {
	key, index := explained{transition, detail}, uint16(0)
	// Adjacent VIPs often have the same transition and detail, so that the map is rarely needed.
	if n := len(c.members); n > 0 && c.groups[c.members[n-1].group].explained == key {
		index = c.members[n-1].group
	} else {
		index = c.groupOf(key)
	}
	c.groups[index].count++
	c.members = append(c.members, member{v, index})
}

// groupOf returns the index of a group, which it adds if necessary.
func (c *Changes) groupOf(key explained) uint16 {
	index, known := c.index[key]
	if !known && key.detail != "" {
		if c.details++; c.details > maxDetails {
			key.detail = ""
			index, known = c.index[key]
		}
	}
	if !known {
		index = uint16(len(c.groups))
		c.index[key] = index
		c.groups = append(c.groups, group{explained: key})
	}
	return index
}

// reset removes all VIPs and keeps the memory.
func (c *Changes) reset() *Changes {
	c.members, c.groups, c.details = c.members[:0], c.groups[:0], 0
	clear(c.index)
	return c
}

// byTransition merges groups that differ only in their detail, and keeps the detail of the first
// VIP.
func byTransition(groups []group) (merged []group) {
	for _, g := range groups {
		same := func(other group) bool { return other.Transition == g.Transition }
		if i := slices.IndexFunc(merged, same); i >= 0 {
			merged[i].count += g.count
		} else {
			merged = append(merged, g)
		}
	}
	return merged
}

// summary describes a decision about many VIPs.
type summary struct {
	count            int
	first            []string // VIPs
	transitions      []*adminv1.VipTransitions
	from, to, reason string // words that all transitions share; "" for words that differ
}

// summarize returns the summary of the transitions that include accepts.
func (c *Changes) summarize(include func(Transition) bool) (all summary) {
	for _, m := range c.members {
		if len(all.first) == maxFirstVIPs {
			break
		}
		if include(c.groups[m.group].Transition) {
			all.first = append(all.first, m.vip.String())
		}
	}
	for _, g := range byTransition(c.groups) {
		if !include(g.Transition) {
			continue
		}
		if all.count == 0 {
			all.from, all.to, all.reason = g.From, g.To, g.Reason
		}
		all.count += g.count
		for _, word := range []struct {
			common *string
			is     string
		}{{&all.from, g.From}, {&all.to, g.To}, {&all.reason, g.Reason}} {
			if *word.common != word.is {
				*word.common = ""
			}
		}
		all.transitions = append(all.transitions, &adminv1.VipTransitions{
			Count: uint32(g.count), Family: g.Family.String(), From: g.From, To: g.To, Reason: g.Reason, Detail: g.detail,
		})
	}
	slices.SortStableFunc(all.transitions, func(a, b *adminv1.VipTransitions) int {
		return int(b.GetCount()) - int(a.GetCount())
	})
	return all
}

// describe returns the transitions as text, largest first.
func (s *summary) describe() string {
	var parts []string
	described := 0
	for _, t := range s.transitions[:min(len(s.transitions), maxDescribed)] {
		text := fmt.Sprintf("%d %s %s to %s", t.GetCount(), t.GetFamily(), t.GetFrom(), t.GetTo())
		if t.GetReason() != "" {
			text += ", " + t.GetReason()
		}
		if t.GetDetail() != "" {
			text += " (" + t.GetDetail() + ")"
		}
		parts = append(parts, text)
		described += int(t.GetCount())
	}
	if more := s.count - described; more > 0 {
		parts = append(parts, fmt.Sprintf("%d others", more))
	}
	return strings.Join(parts, "; ")
}

// attributes returns the attributes of the log line. Common words have the same attributes as in
// the lines of single VIPs.
func (s *summary) attributes() []any {
	attributes := []any{"count", s.count}
	for _, word := range [][2]string{{"from", s.from}, {"to", s.to}, {"reason", s.reason}} {
		if word[1] != "" {
			attributes = append(attributes, word[0], word[1])
		}
	}
	return append(attributes, "transitions", s.describe(), "vips", s.first)
}

// event returns the event of the decision. Its detail begins with the VIPs, because a table
// truncates the end.
func (s *summary) event() *adminv1.Event {
	names := strings.Join(s.first, ", ")
	if more := s.count - len(s.first); more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	to := s.to
	if to == "" {
		to = "changed"
	}
	return &adminv1.Event{
		Object: fmt.Sprint(s.count, " VIPs"), From: s.from, To: to, Reason: s.reason, Detail: names + ": " + s.describe(),
		VipCount: uint32(s.count), FirstVips: s.first, Transitions: s.transitions,
	}
}
