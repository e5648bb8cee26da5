package load

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Result counts the outcomes of the requests and flows that began in a phase.
type Result struct {
	Took time.Duration // the length of the phase; 0 while it lasts

	Sent, Answered, Failed int // requests
	// Withheld counts requests that were due but not sent, since the machine was suspended or too
	// many requests were open. They do not count as failures, but the run had less load than
	// configured.
	Withheld int
	// Fastest and Slowest are the shortest and the longest time from the first SYN of a request to
	// the end of its answer; 0 without answers.
	Fastest, Slowest time.Duration
	ByTarget         map[string]int // answers to requests

	// Flows are the long-lived flows that existed in the phase, by number; a flow that replaces a
	// broken one follows it.
	Flows []Flow
	// Unopened are attempts to open a flow that failed.
	Unopened int

	// Failures are the first few failures of any kind.
	Failures []Failure
}

// Flow is the outcome of a long-lived flow in a phase.
type Flow struct {
	Number    int
	To        netip.AddrPort
	Target    string        // the target that served it
	Opened    time.Duration // when it was opened, since the start of the generator
	Exchanges int           // frames that were answered
	// LongestGap is the longest time between two answers, which includes the
	// pace; for a broken flow also from the last answer to the break.
	LongestGap time.Duration
	Broken     string // why it broke; "" when it did not
}

// Failure is one failed request or flow.
type Failure struct {
	After time.Duration // since the start of the generator
	To    netip.AddrPort
	Stage string // connect, ask, answer; open flow, flow at a target
	Err   string
}

// String returns the failure as one line.
func (f Failure) String() string {
	return fmt.Sprintf("after %.3f s, %s of %s: %s", f.After.Seconds(), f.Stage, f.To, f.Err)
}

// copy returns the result so far. The generator's lock is held.
func (c *phase) copy() Result {
	r := c.result
	r.ByTarget = maps.Clone(r.ByTarget)
	r.Failures = slices.Clone(r.Failures)
	for _, f := range c.flows {
		r.Flows = append(r.Flows, *f)
	}
	slices.SortFunc(r.Flows, func(a, b Flow) int {
		return cmp.Or(cmp.Compare(a.Number, b.Number), cmp.Compare(a.Opened, b.Opened))
	})
	return r
}

// Broken counts the broken flows: of targets that stayed, and of targets that left.
func (r Result) Broken(left ...string) (ofStayed, ofLeft int) {
	for _, f := range r.Flows {
		switch {
		case f.Broken == "":
		case slices.Contains(left, f.Target):
			ofLeft++
		default:
			ofStayed++
		}
	}
	return ofStayed, ofLeft
}

// Targets counts the flows of each target.
func (r Result) Targets() map[string]int {
	n := map[string]int{}
	for _, f := range r.Flows {
		n[f.Target]++
	}
	return n
}

// LongestGap returns the longest time between two answers on a flow of a target that stayed, or
// from the last answer of such a flow to its break.
func (r Result) LongestGap(left ...string) time.Duration {
	var longest time.Duration
	for _, f := range r.Flows {
		if !slices.Contains(left, f.Target) {
			longest = max(longest, f.LongestGap)
		}
	}
	return longest
}

// Lost returns an error if requests or flows of targets that stayed were lost: a planned change
// may lose neither.
func (r Result) Lost(left ...string) error {
	broken, _ := r.Broken(left...)
	if r.Failed == 0 && broken == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d requests failed and %d of %d flows broke whose targets stayed; first failures:%s",
		r.Failed, r.Sent, broken, len(r.Flows), lines(r.Failures))
}

func lines(failures []Failure) string {
	var b strings.Builder
	for _, f := range failures {
		b.WriteString("\n\t" + f.String())
	}
	return b.String()
}

// String returns a table with the first failures below it.
func (r Result) String() string {
	return Table(Row{Result: r}) + strings.TrimPrefix(lines(r.Failures), "\n")
}

// Row is a result in a table.
type Row struct {
	Title  string
	Result Result
	Left   []string // targets that left
}

// columns of a table, in order.
var columns = []struct {
	head string
	cell func(Row) string
}{
	{"sent", func(w Row) string { return fmt.Sprint(w.Result.Sent) }},
	{"answered", func(w Row) string { return fmt.Sprint(w.Result.Answered) }},
	{"failed", func(w Row) string { return fmt.Sprint(w.Result.Failed) }},
	{"flows", func(w Row) string { return fmt.Sprint(len(w.Result.Flows)) }},
	{"broken", func(w Row) string { stayed, _ := w.Result.Broken(w.Left...); return fmt.Sprint(stayed) }},
	{"of leavers", func(w Row) string { _, left := w.Result.Broken(w.Left...); return fmt.Sprint(left) }},
	{"longest gap", func(w Row) string { return milliseconds(w.Result.LongestGap(w.Left...)) }},
	{"slowest answer", func(w Row) string { return milliseconds(w.Result.Slowest) }},
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%d ms", d.Round(time.Millisecond).Milliseconds())
}

// Table formats rows for terminals, one line per row. "broken" counts the long-lived flows of
// targets that stayed, "of leavers" the flows of targets that left; the longest gap covers the
// targets that stayed.
func Table(rows ...Row) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, c := range columns {
		fmt.Fprint(w, "\t", c.head)
	}
	fmt.Fprintln(w, "\t")
	width := 0
	for _, r := range rows {
		width = max(width, len(r.Title))
	}
	for _, r := range rows {
		fmt.Fprintf(w, "%-*s", width, r.Title) // numbers are right-aligned, words left-aligned
		for _, c := range columns {
			fmt.Fprint(w, "\t", c.cell(r))
		}
		fmt.Fprintln(w, "\t")
	}
	// Writes to a strings.Builder never fail.
	_ = w.Flush()
	return b.String()
}

// SideBySide formats rows like Table, with a column for each row, to compare two runs.
func SideBySide(rows ...Row) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, r := range rows {
		fmt.Fprint(w, "\t", r.Title)
	}
	fmt.Fprintln(w, "\t")
	for _, c := range columns {
		fmt.Fprint(w, c.head)
		for _, r := range rows {
			fmt.Fprint(w, "\t", c.cell(r))
		}
		fmt.Fprintln(w, "\t")
	}
	_ = w.Flush()
	return b.String()
}
