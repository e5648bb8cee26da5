package status

import (
	"fmt"
	"slices"
	"strings"
)

// MaxSingle is the largest number of VIPs of one decision that have a line of the log and an event
// each. More have one line and one event together, and a line each at level debug: 10 000 lines take
// as long as the decision.
const MaxSingle = 50

const (
	// MaxFirstVIPs is how many VIPs a line of the log or an event of more than [MaxSingle] names.
	MaxFirstVIPs = 5
	// maxTransitions is how many transitions such a text describes; the rest is counted.
	maxTransitions = 5
)

// Tally counts the VIPs of one decision by what it does to them. There are few such transitions,
// and VIPs beside each other often have the same: its cost is that of a comparison.
type Tally[T comparable] struct {
	list []Tallied[T]
	last int
}

// Tallied is one transition, and how many VIPs it has.
type Tallied[T comparable] struct {
	Transition T
	Count      int
}

// Add counts a VIP and returns the index of its transition, in the order of their first VIPs.
func (t *Tally[T]) Add(transition T) int {
	if t.last < len(t.list) && t.list[t.last].Transition == transition {
		t.list[t.last].Count++
		return t.last
	}
	t.last = slices.IndexFunc(t.list, func(x Tallied[T]) bool { return x.Transition == transition })
	if t.last < 0 {
		t.last = len(t.list)
		t.list = append(t.list, Tallied[T]{Transition: transition})
	}
	t.list[t.last].Count++
	return t.last
}

// List returns the transitions in the order of their first VIPs. It must not be modified.
func (t *Tally[T]) List() []Tallied[T] { return t.list }

// Transitions is what a decision did to VIPs, in words.
type Transitions struct {
	Count                    int
	Family, From, To, Reason string
	Detail                   string // of the first of them
}

// LargestFirst orders transitions.
func LargestFirst(a, b Transitions) int { return b.Count - a.Count }

// Describe returns a text of transitions in their order, of the first five each by itself.
func Describe(list []Transitions) string {
	var parts []string
	for _, t := range list[:min(len(list), maxTransitions)] {
		text := fmt.Sprintf("%d %s %s to %s", t.Count, t.Family, t.From, t.To)
		if t.Reason != "" {
			text += ", " + t.Reason
		}
		if t.Detail != "" {
			text += " (" + t.Detail + ")"
		}
		parts = append(parts, text)
	}
	others := 0
	for _, t := range list[len(parts):] {
		others += t.Count
	}
	if others > 0 {
		parts = append(parts, fmt.Sprintf("%d others", others))
	}
	return strings.Join(parts, "; ")
}

// Common returns the words that all transitions have, "" for those that differ.
func Common(list []Transitions) (from, to, reason string) {
	for i, t := range list {
		if i == 0 {
			from, to, reason = t.From, t.To, t.Reason
		}
		if t.From != from {
			from = ""
		}
		if t.To != to {
			to = ""
		}
		if t.Reason != reason {
			reason = ""
		}
	}
	return from, to, reason
}

// LogAttributes returns the attributes of the line of the log about that many VIPs: what they have
// in common as in the lines of single VIPs.
func LogAttributes(total int, list []Transitions, first []string) []any {
	attributes := []any{"count", total}
	from, to, reason := Common(list)
	for _, a := range [][2]string{{"from", from}, {"to", to}, {"reason", reason}} {
		if a[1] != "" {
			attributes = append(attributes, a[0], a[1])
		}
	}
	return append(attributes, "transitions", Describe(list), "vips", first)
}

// DescribeVIPs is [Describe] after the names of the first VIPs, which are short: a table cuts the end.
func DescribeVIPs(list []Transitions, first []string, total int) string {
	names := strings.Join(first, ", ")
	if more := total - len(first); more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	return names + ": " + Describe(list)
}
