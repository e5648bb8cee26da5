package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// columns returns the headings of the table.
func columns() []string {
	return []string{"#", "what", "N", "method", "count", "min", "median", "p95", "p99", "max", "unit", "ratio", "goal"}
}

// cells returns one line of the table.
func (m *result) cells() []string {
	n, ratio, goal := "", "", m.Goal
	if m.N > 0 {
		n = strconv.Itoa(m.N)
	}
	if m.Ratio > 0 {
		ratio = number(m.Ratio) + "×"
	}
	if len(m.Missed) > 0 {
		goal += " (missed: " + strings.Join(m.Missed, ", ") + ")"
	}
	return []string{
		strconv.Itoa(m.Row), m.What, n, m.Method, strconv.Itoa(m.Count),
		number(m.Min), number(m.Median), number(m.P95), number(m.P99), number(m.Max), m.Unit, ratio, goal,
	}
}

// number formats a value with three significant digits.
func number(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v >= 100 || v <= -100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10 || v <= -10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v >= 1 || v <= -1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	default:
		return strconv.FormatFloat(v, 'f', 3, 64)
	}
}

// about returns the lines that describe the machine, the date and the software.
func (r *report) about() []string {
	lines := []string{
		"date: " + r.Date.UTC().Format("2006-01-02 15:04:05 MST"),
		"command: " + strings.Join(r.Command, " "),
		"commit: " + r.Commit,
		"machine: " + r.Machine.String(),
		fmt.Sprintf("versions: %s, BIRD %s", r.Go, r.BIRD),
		fmt.Sprintf("load average: %s before, %s after %.0f s", r.LoadBefore, r.LoadAfter, r.Seconds),
	}
	if r.Quick {
		lines = append(lines, "a quick run: its numbers say nothing")
	}
	return lines
}

// remarks returns the notes and failures, a line each.
func (r *report) remarks() []string {
	var lines []string
	for _, n := range r.Notes {
		lines = append(lines, fmt.Sprintf("row %d: %s", n.Row, n.Text))
	}
	for _, f := range r.Failures {
		lines = append(lines, fmt.Sprintf("row %d FAILED: %s", f.Row, f.Error))
	}
	return lines
}

// writeText prints the report as text.
func (r *report) writeText(w io.Writer) error {
	var b strings.Builder
	for _, line := range r.about() {
		b.WriteString(line + "\n")
	}
	b.WriteString("\n")
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, line := range r.lines() {
		fmt.Fprintln(t, strings.Join(line, "\t"))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if remarks := r.remarks(); len(remarks) > 0 {
		b.WriteString("\n" + strings.Join(remarks, "\n") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *report) lines() [][]string {
	lines := [][]string{columns()}
	for _, m := range r.Results {
		lines = append(lines, m.cells())
	}
	return lines
}
