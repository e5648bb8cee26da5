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
	rows   [][]string
	headed bool
	width  []int // least width of each column
}

func newTable(header ...string) *table { return &table{rows: [][]string{header}, headed: true} }

func (rows *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = cut(fmt.Sprint(cell), maxCell)
	}
	last := len(cells) - 1
	// The last cell is free text and moves no other column.
	row[last] = cut(fmt.Sprint(cells[last]), maxLine)
	rows.rows = append(rows.rows, row)
}

// row adds a row of cells without control characters.
func (rows *table) row(cells ...string) { rows.rows = append(rows.rows, cells) }

// explain adds a count with its subject and meaning and, for a problem, the next check.
func (rows *table) explain(count int, what, meaning string, explanation Explanation) {
	rows.row(fmt.Sprint(count), what, meaning)
	if explanation.Next != "" {
		rows.row("", "", "next: "+explanation.Next)
	}
}

// write appends the table after an empty line, unless it has no row but the header.
func (rows *table) write(out *strings.Builder) {
	if len(rows.rows) == 0 || rows.headed && len(rows.rows) == 1 {
		return
	}
	out.WriteByte('\n')
	rows.align(out, "")
}

// align writes the rows with their columns aligned.
func (rows *table) align(out *strings.Builder, indent string) {
	// The widths only grow, so that later rows of a followed table stay aligned.
	for _, row := range rows.rows {
		for i, cell := range row {
			if i == len(rows.width) {
				rows.width = append(rows.width, 0)
			}
			rows.width[i] = max(rows.width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows.rows {
		line := indent
		for i, cell := range row {
			line += fmt.Sprintf("%-*s  ", rows.width[i], cell)
		}
		out.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}

// writeList appends items, each with lines of details, under a title.
func writeList(out *strings.Builder, title string, items [][]string) {
	if len(items) == 0 {
		return
	}
	out.WriteString("\n" + title + "\n")
	// A longer list would move the tables out of the terminal.
	for _, lines := range items[:min(len(items), maxItems)] {
		indent := "  "
		for _, line := range lines {
			out.WriteString(indent + cut(line, maxLine) + "\n")
			indent = "    "
		}
	}
	if more := len(items) - maxItems; more > 0 {
		fmt.Fprintf(out, "  and %d more: --output=json has them all\n", more)
	}
}

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
	compare := func(first, second E) int { return cmp.Compare(rank(first), rank(second)) }
	return slices.SortedStableFunc(slices.Values(all), compare)
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
func clean(text string) string {
	return strings.TrimSpace(strings.Map(func(char rune) rune {
		switch {
		case char == utf8.RuneError:
			return '?'
		case !unicode.IsPrint(char):
			return ' '
		}
		return char
	}, text))
}

// cut returns the clean text, truncated to count runes, or none if it is empty.
func cut(text string, count int) string {
	text = clean(text)
	if text == "" {
		return none
	}
	// Count runes: a cut within a rune would print garbage.
	if utf8.RuneCountInString(text) <= count {
		return text
	}
	return string([]rune(text)[:count-1]) + "…"
}

// names lists a few names and counts the rest.
func names(list []string) string {
	if len(list) <= maxNames {
		return strings.Join(list, ",")
	}
	return fmt.Sprintf("%s +%d", strings.Join(list[:maxNames], ","), len(list)-maxNames)
}

// plural returns a count with its noun: "1 VIP", "2 VIPs".
func plural(count int, what string) string {
	if count == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", count, what)
}

// ago returns the time since stamp, none if it is nil. A time in the future (clock skew) is now.
func ago(stamp *timestamppb.Timestamp, now time.Time) string {
	if stamp == nil {
		return none
	}
	return span(max(0, now.Sub(stamp.AsTime())))
}

// left returns the remaining time: "ends in 43m0s", or "ended 3s ago".
func left(duration time.Duration) string {
	if duration < 0 {
		return "ended " + span(-duration) + " ago"
	}
	return "ends in " + span(duration)
}

// span formats a duration with at most two units.
func span(duration time.Duration) string {
	switch {
	case duration < time.Second:
		return fmt.Sprintf("%dms", duration.Milliseconds())
	case duration < time.Hour:
		return duration.Truncate(time.Second).String()
	case duration < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(duration.Hours()), int(duration.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(duration.Hours())/24, int(duration.Hours())%24)
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
func (counts summary) write(out *strings.Builder, view View) {
	groups := slices.SortedFunc(maps.Keys(counts), func(first, second group) int {
		return cmp.Or(cmp.Compare(first.rank, second.rank), cmp.Compare(counts[second], counts[first]),
			strings.Compare(first.explanation.Short, second.explanation.Short))
	})
	rows := &table{}
	for _, line := range groups {
		if view.Problems && line.explanation.Next == "" {
			continue
		}
		rows.explain(counts[line], line.state, line.explanation.Short+". "+line.explanation.Meaning, line.explanation)
	}
	rows.align(out, "  ")
}

// readiness is the name of the conjunction. Its parts are listed with their reasons instead.
const readiness = "Readiness"

// writeConditions appends the conditions that do not hold.
func writeConditions(out *strings.Builder, all []*adminv1.Condition) {
	rows := &table{}
	for _, condition := range all {
		if !condition.GetServing() && condition.GetName() != readiness {
			rows.row(clean(condition.GetName()), cut(condition.GetDetail(), maxError))
		}
	}
	at := slices.IndexFunc(all, func(condition *adminv1.Condition) bool { return condition.GetName() == readiness })
	ready := at >= 0 && all[at].GetServing()
	// The list has no entry for a part that was never set; only the conjunction names it.
	if at >= 0 && !ready && len(rows.rows) == 0 {
		rows.row(readiness, cut(all[at].GetDetail(), maxError))
	}
	switch {
	case len(rows.rows) == 0:
		return
	case ready:
		out.WriteString("\nReady, although these conditions do not hold:\n")
	default:
		out.WriteString("\nNOT READY, since these conditions do not hold:\n")
	}
	rows.align(out, "  ")
}

func identity(id string, end *timestamppb.Timestamp, now time.Time) string {
	if id == "" {
		return "none yet"
	}
	if end == nil {
		return cut(id, maxLine)
	}
	return fmt.Sprintf("%s, %s", cut(id, maxLine), left(end.AsTime().Sub(now)))
}

// writeConfigurationError appends why the trench file on disk, or part of the NSP's configuration,
// is not in force. source names the source of the configuration, "" for the trench file.
func writeConfigurationError(out *strings.Builder, problems, trench, source string) {
	if problems == "" {
		return
	}
	inForce := "an older one is"
	if trench == "" {
		inForce = "none is, and there are no VIPs"
	}
	if strings.HasPrefix(source, "NSP ") {
		fmt.Fprintf(out, "\nThe configuration of the %s is not in force, or not all of it:\n", cut(source, maxCell))
	} else {
		out.WriteString("\nThe trench file on disk is not in force, since it is refused or cannot be read; ")
		out.WriteString(inForce + ":\n")
	}
	for line := range strings.Lines(problems) {
		out.WriteString("  " + cut(line, maxLine) + "\n")
	}
}

// JSON renders a message with every field, indented or on one line. Unlike the output of
// protojson, its spacing is stable.
func JSON(message proto.Message, indented bool) (string, error) {
	raw, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(message)
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
