package status

import (
	"fmt"
	"slices"
	"strings"
)

// MaxSingle is the largest number of VIPs of one decision that have a log line and an event each.
// A larger decision has one log line and one event, because logging 10 000 lines takes as long as
// the decision. At level debug each VIP has a line.
const MaxSingle = 50

const (
	// MaxFirstVIPs is the number of VIPs named in the log line or event of more than [MaxSingle]
	// VIPs.
	MaxFirstVIPs = 5
	// maxTransitions is the number of transitions that such a text describes; the rest is counted.
	maxTransitions = 5
)

// Tally counts the VIPs of one decision by transition. A decision has few different transitions,
// and adjacent VIPs often have the same one, so that Add usually costs one comparison.
type Tally[T comparable] struct {
	list []Tallied[T]
	last int
}

// Tallied is one transition with its number of VIPs.
type Tallied[T comparable] struct {
	Transition T
	Count      int
}

// Add counts a VIP and returns the index of its transition. Transitions are ordered by their first
// VIP.
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

// List returns the transitions, ordered by their first VIP. The result must not be modified.
func (t *Tally[T]) List() []Tallied[T] { return t.list }

// Transitions describes in words one transition of several VIPs.
type Transitions struct {
	Count                    int
	Family, From, To, Reason string
	Detail                   string // detail of the first VIP
}

// LargestFirst compares transitions by descending count.
func LargestFirst(a, b Transitions) int { return b.Count - a.Count }

// Describe returns a text of the transitions in their order. It describes the first five and
// counts the rest.
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

// Common returns the words that all transitions share, and "" for words that differ.
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

// LogAttributes returns the attributes of a log line about total VIPs. Common values have the same
// attributes as in the lines of single VIPs.
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

// DescribeVIPs puts the names of the first VIPs before the text of [Describe], because a table
// truncates the end.
func DescribeVIPs(list []Transitions, first []string, total int) string {
	names := strings.Join(first, ", ")
	if more := total - len(first); more > 0 {
		names += fmt.Sprintf(" and %d more", more)
	}
	return names + ": " + Describe(list)
}
