package status

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
)

const (
	none     = "-" // an empty cell
	maxCell  = 100 // runes of a cell
	maxLine  = 300 // runes of a line of free text
	maxError = 900 // runes of an error, whose remedy comes last
	maxNames = 3   // names listed in a cell; the rest is counted
	maxItems = 20  // items of a list
)

// table aligns cells under a header.
type table struct {
	rows  [][]string
	width []int // least width of each column
}

func newTable(header ...string) *table { return &table{rows: [][]string{header}} }

func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = cut(fmt.Sprint(c), maxCell)
	}
	last := len(cells) - 1
	row[last] = cut(fmt.Sprint(cells[last]), maxLine)
	t.rows = append(t.rows, row)
}

// row adds a row of cells without control characters.
func (t *table) row(cells ...string) { t.rows = append(t.rows, cells) }

// explain adds a count with its subject and meaning and, for a problem, the next check.
func (t *table) explain(n int, what, meaning string, e Explanation) {
	t.row(fmt.Sprint(n), what, meaning)
	if e.Next != "" {
		t.row("", "", "next: "+e.Next)
	}
}

// write appends the table, unless it has only the header.
func (t *table) write(b *strings.Builder) {
	if len(t.rows) < 2 {
		return
	}
	b.WriteByte('\n')
	t.align(b, "")
}

// align writes the rows with their columns aligned.
func (t *table) align(b *strings.Builder, indent string) {
	for _, row := range t.rows {
		for i, c := range row {
			if i == len(t.width) {
				t.width = append(t.width, 0)
			}
			t.width[i] = max(t.width[i], utf8.RuneCountInString(c))
		}
	}
	for _, row := range t.rows {
		line := indent
		for i, c := range row {
			line += fmt.Sprintf("%-*s  ", t.width[i], c)
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}

// writeList appends items, each with lines of details, under a title.
func writeList(b *strings.Builder, title string, items [][]string) {
	if len(items) == 0 {
		return
	}
	b.WriteString("\n" + title + "\n")
	for _, lines := range items[:min(len(items), maxItems)] {
		indent := "  "
		for _, line := range lines {
			b.WriteString(indent + cut(line, maxLine) + "\n")
			indent = "    "
		}
	}
	if more := len(items) - maxItems; more > 0 {
		fmt.Fprintf(b, "  and %d more: `lb status --output=json` has them all\n", more)
	}
}

// problemItems returns the items of a list of problems.
func problemItems(problems []*adminv1.Problem) (items [][]string) {
	for _, problem := range problems {
		lines := []string{problem.GetObject() + ": " + problem.GetDetail()}
		if len(problem.GetVips()) > 0 {
			lines = append(lines, "not served: "+names(problem.GetVips()))
		}
		if problem.GetRemedy() != "" {
			lines = append(lines, "remedy: "+problem.GetRemedy())
		}
		items = append(items, lines)
	}
	return items
}

// problemsFirst returns a copy sorted by rank. Problems have the lowest rank.
func problemsFirst[E any](all []E, rank func(E) int) []E {
	return slices.SortedStableFunc(slices.Values(all), func(x, y E) int { return cmp.Compare(rank(x), rank(y)) })
}

// single returns each line as an item of one line.
func single(lines []string) [][]string { return slices.Collect(slices.Chunk(lines, 1)) }

func upOrDown(up bool) string {
	if up {
		return "up"
	}
	return "DOWN"
}

// clean removes control characters, which could move the cursor or hide text.
func clean(s string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError:
			return '?'
		case !unicode.IsPrint(r):
			return ' '
		}
		return r
	}, s))
}

// cut returns the clean text, truncated to n runes, or none if it is empty.
func cut(s string, n int) string {
	s = clean(s)
	if s == "" {
		return none
	}
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// names lists a few names and counts the rest.
func names(list []string) string {
	if len(list) <= maxNames {
		return strings.Join(list, ",")
	}
	return fmt.Sprintf("%s +%d", strings.Join(list[:maxNames], ","), len(list)-maxNames)
}

// plural returns a count with its noun: "1 VIP", "2 VIPs".
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// ago returns the time since t, or none if t is nil. A time in the future (clock skew) counts as
// now.
func ago(t *timestamppb.Timestamp, now time.Time) string {
	if t == nil {
		return none
	}
	return span(max(0, now.Sub(t.AsTime())))
}

// left returns the remaining time: "ends in 43m0s", or "ended 3s ago".
func left(d time.Duration) string {
	if d < 0 {
		return "ended " + span(-d) + " ago"
	}
	return "ends in " + span(d)
}

// span formats a duration with at most two units.
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < time.Hour:
		return d.Truncate(time.Second).String()
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

// summary counts combinations of state and reason over VIPs.
type summary map[group]int

// group is one line of a summary. Lines are sorted by rank.
type group struct {
	rank        int
	state       string
	explanation Explanation
}

// write appends a line for each group with its count and, for a problem, the next check.
func (s summary) write(b *strings.Builder) {
	groups := slices.SortedFunc(maps.Keys(s), func(x, y group) int {
		return cmp.Or(cmp.Compare(x.rank, y.rank), cmp.Compare(s[y], s[x]),
			strings.Compare(x.explanation.Short, y.explanation.Short))
	})
	t := &table{}
	for _, g := range groups {
		t.explain(s[g], g.state, g.explanation.Short+". "+g.explanation.Meaning, g.explanation)
	}
	t.align(b, "  ")
}

// readiness is the name of the conjunction. Its parts are listed with their reasons instead.
const readiness = "Readiness"

// writeConditions appends the conditions that do not hold.
func writeConditions(b *strings.Builder, all []*adminv1.Condition) {
	t := &table{}
	for _, c := range all {
		if !c.GetServing() && c.GetName() != readiness {
			t.row(clean(c.GetName()), cut(c.GetDetail(), maxError))
		}
	}
	at := slices.IndexFunc(all, func(c *adminv1.Condition) bool { return c.GetName() == readiness })
	ready := at >= 0 && all[at].GetServing()
	if at >= 0 && !ready && len(t.rows) == 0 {
		t.row(readiness, cut(all[at].GetDetail(), maxError))
	}
	switch {
	case len(t.rows) == 0:
		return
	case ready:
		b.WriteString("\nReady, although these conditions do not hold:\n")
	default:
		b.WriteString("\nNOT READY, since these conditions do not hold:\n")
	}
	t.align(b, "  ")
}

// identity returns the SPIFFE ID of a program and its expiry.
func identity(id string, end *timestamppb.Timestamp, now time.Time) string {
	if id == "" {
		return "none yet"
	}
	if end == nil {
		return cut(id, maxLine)
	}
	return fmt.Sprintf("%s, %s", cut(id, maxLine), left(end.AsTime().Sub(now)))
}

// writeConfigurationError appends why the trench file on disk, or part of the NSP's
// configuration, is not in force. source names the source of the configuration, "" for the trench
// file.
func writeConfigurationError(b *strings.Builder, problems, trench, source string) {
	if problems == "" {
		return
	}
	inForce := "an older one is"
	if trench == "" {
		inForce = "none is, and there are no VIPs"
	}
	if strings.HasPrefix(source, "NSP ") {
		fmt.Fprintf(b, "\nThe configuration of the %s is not in force, or not all of it:\n", cut(source, maxCell))
	} else {
		b.WriteString("\nThe trench file on disk is not in force, since it is refused or cannot be read; ")
		b.WriteString(inForce + ":\n")
	}
	for line := range strings.Lines(problems) {
		b.WriteString("  " + cut(line, maxLine) + "\n")
	}
}

// JSON renders a message with every field, indented or on one line. Unlike the output of
// protojson, its spacing is stable.
func JSON(m proto.Message, indented bool) (string, error) {
	raw, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	var b bytes.Buffer
	switch {
	case err != nil:
	case indented:
		err = json.Indent(&b, raw, "", "  ")
	default:
		err = json.Compact(&b, raw)
	}
	if err != nil {
		return "", fmt.Errorf("failed to render status as JSON: %w", err)
	}
	b.WriteByte('\n')
	return b.String(), nil
}
