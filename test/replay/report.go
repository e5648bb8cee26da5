package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/machine"
)

// Marks of the table in the document.
const (
	tableBegin = "<!-- begin replay -->\n"
	tableEnd   = "<!-- end replay -->\n"
)

// row is an incident with its results.
type row struct {
	scenario
	Met       bool    `json:"met"`
	Vipgate   result  `json:"vipgate"`
	Reference *result `json:"reference,omitempty"` // nil if it cannot be run
}

func seconds(d time.Duration) string {
	return strings.TrimSuffix(fmt.Sprintf("%.2f", d.Seconds()), ".00")
}

// cell formats both numbers of a result.
func (r *result) cell() string {
	if r == nil {
		return "–"
	} else if r.Err != "" {
		return "failed"
	}
	return seconds(r.Worst.BlackHole) + "/" + seconds(r.Worst.Dark)
}

// String returns the row for terminals.
func (r row) String() string {
	line := fmt.Sprintf("%-4s %-16s black hole/dark s %-10s reference %-10s budget %s (%s) met %t; timers %v late\n",
		r.ID, r.Title, r.Vipgate.cell(), r.Reference.cell(), seconds(r.Budget.Limit), r.Budget.Name, r.Met,
		r.Vipgate.Late.Round(time.Millisecond))
	for _, one := range []*result{&r.Vipgate, r.Reference} {
		if one != nil && one.Err != "" {
			line += "     " + one.Err + "\n"
		}
	}
	return line
}

// line returns the row of the Markdown table.
func (r row) line() string {
	cause, verdict := r.Cause, "**missed**"
	if r.Note != "" {
		cause += " (" + r.Note + ")"
	}
	if r.Met {
		verdict = "met"
	}
	return fmt.Sprintf("| %s [%s](%s) | %s | %s | %s %s | %s |\n", r.ID, r.Title, r.Link, cause, r.Vipgate.cell(),
		seconds(r.Budget.Limit), verdict, r.Reference.cell())
}

// report is a run of all incidents.
type report struct {
	machine.Machine
	Rows []row `json:"rows"`
}

// table returns the Markdown table.
func (r report) table() string {
	text := fmt.Sprintf("%s, commit %s, %s,\nBIRD %s:\n\n"+
		"| incident | cause, as injected | vipgate | budget | reference |\n|---|---|---|---|---|\n",
		r.Date.UTC().Format(time.DateOnly), r.Commit, r.Machine, r.BIRD)
	for _, row := range r.Rows {
		text += row.line()
	}
	return text
}

// publish writes the results to the files of the command line.
func (o options) publish(r report) error {
	if o.json != "" {
		text, err := json.MarshalIndent(r, "", "  ")
		if err = errors.Join(err, os.WriteFile(o.json, append(text, '\n'), 0o644)); err != nil {
			return err
		}
	}
	if o.document == "" {
		return nil
	}
	text, err := os.ReadFile(o.document)
	before, rest, _ := strings.Cut(string(text), tableBegin)
	_, after, found := strings.Cut(rest, tableEnd)
	if err != nil || !found {
		return fmt.Errorf("%s cannot be read or lacks the marks of the table: %w", o.document, err)
	}
	return os.WriteFile(o.document, []byte(before+tableBegin+"\n"+r.table()+"\n"+tableEnd+after), 0o644)
}
