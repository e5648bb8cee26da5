package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// Marks of the table in the document.
const (
	tableBegin = "<!-- begin replay -->\n"
	tableEnd   = "<!-- end replay -->\n"
)

// row is an incident with its results.
type row struct {
	scenario  scenario
	result    result
	reference *result // nil if it cannot be run
}

func (r row) met() bool { return r.result.within(r.scenario.budget) }

// seconds formats a duration with the resolution of the requests.
func seconds(d time.Duration) string {
	if d == 0 {
		return "0"
	}
	return fmt.Sprintf("%.2f", d.Seconds())
}

// String returns the row for terminals.
func (r row) String() string {
	var b strings.Builder
	verdict := "met"
	if !r.met() {
		verdict = "MISSED"
	}
	fmt.Fprintf(&b, "%-4s %-28s black hole %5s s, dark %5s s  %s (%s; timers %s ms late)", r.scenario.id, r.scenario.title,
		seconds(r.result.Worst.BlackHole), seconds(r.result.Worst.Dark), verdict, r.scenario.budget.Name,
		fmt.Sprint(r.result.Late.Milliseconds()))
	if r.reference != nil {
		fmt.Fprintf(&b, "  reference %s and %s s", seconds(r.reference.Worst.BlackHole), seconds(r.reference.Worst.Dark))
	}
	b.WriteString("\n")
	for _, one := range []*result{&r.result, r.reference} {
		if one != nil && one.Err != "" {
			fmt.Fprintf(&b, "     %s\n", one.Err)
		}
	}
	return b.String()
}

// cells formats both numbers of a result for the table.
func (r *result) cells() string {
	switch {
	case r == nil:
		return "–"
	case r.Err != "":
		return "failed"
	}
	return seconds(r.Worst.BlackHole) + " / " + seconds(r.Worst.Dark)
}

// table returns the Markdown table.
func table(rows []row) string {
	var b strings.Builder
	b.WriteString("| incident | cause, as injected | budget | vipgate | met | reference |\n|---|---|---|---|---|---|\n")
	for _, r := range rows {
		met := "yes"
		if !r.met() {
			met = "**no**"
		}
		cause := r.scenario.cause
		if r.scenario.note != "" {
			cause += " (" + r.scenario.note + ")"
		}
		fmt.Fprintf(&b, "| %s [%s](https://%s) | %s | %s | %s | %s | %s |\n", r.scenario.id, r.scenario.title,
			r.scenario.link, cause, r.scenario.budget.Name, r.result.cells(), met, r.reference.cells())
	}
	return b.String()
}

// publish writes the results to the files of the command line.
func (o options) publish(rows []row) error {
	var errs []error
	if o.json != "" {
		errs = append(errs, writeJSON(o.json, rows))
	}
	if o.document != "" {
		text, err := os.ReadFile(o.document)
		if err != nil {
			return err
		}
		before, rest, found := strings.Cut(string(text), tableBegin)
		_, after, ends := strings.Cut(rest, tableEnd)
		if !found || !ends {
			return fmt.Errorf("%s lacks the marks of the table", o.document)
		}
		errs = append(errs, os.WriteFile(o.document, []byte(before+tableBegin+"\n"+table(rows)+"\n"+tableEnd+after), 0o644))
	}
	return errors.Join(errs...)
}

func writeJSON(path string, rows []row) error {
	type entry struct {
		Incident  string  `json:"incident"`
		Title     string  `json:"title"`
		Link      string  `json:"link"`
		Cause     string  `json:"cause"`
		Note      string  `json:"note,omitempty"`
		Budget    budget  `json:"budget"`
		Met       bool    `json:"met"`
		Vipgate   result  `json:"vipgate"`
		Reference *result `json:"reference,omitempty"`
	}
	var entries []entry
	for _, r := range rows {
		s := r.scenario
		entries = append(entries, entry{s.id, s.title, "https://" + s.link, s.cause, s.note, s.budget, r.met(), r.result,
			r.reference})
	}
	text, err := json.MarshalIndent(entries, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}
