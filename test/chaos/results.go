package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/generated"
)

// section is the name of the results in docs/proof.md.
const section = "chaos"

// slowest is the last row of the results.
const slowest = "the slowest recovery"

// publish writes the results of runs, from their JSON, into a document.
func publish(document string, files []string) error {
	var runs []Summary
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("results: %w", err)
		}
		var s Summary
		if err := json.Unmarshal(text, &s); err != nil {
			return fmt.Errorf("results in %s: %w", file, err)
		}
		runs = append(runs, s)
	}
	text, err := results(runs)
	if err != nil {
		return err
	}
	return generated.Section(document, section, text, true)
}

// results returns the table of runs of one commit on one machine, with a row for each cause that
// has a rule.
func results(runs []Summary) (string, error) {
	if len(runs) == 0 {
		return "", errors.New("no run to publish")
	}
	first := runs[0]
	var seeds []string
	samples := map[string][]time.Duration{}
	injected, excused, recovery := 0, 0, time.Duration(0)
	for _, s := range runs {
		if s.Commit != first.Commit || s.Machine.String() != first.Machine.String() || s.External != first.External {
			return "", fmt.Errorf("seed %d is of commit %s on %s, seed %d of commit %s on %s: publish runs of one commit, "+
				"machine and speaker", first.Seed, first.Commit, first.Machine, s.Seed, s.Commit, s.Machine)
		}
		seed := fmt.Sprint(s.Seed)
		if !s.Passed {
			seed += " (**failed**)"
		}
		seeds = append(seeds, seed)
		injected, excused, recovery = injected+s.Injected, excused+s.Excused, max(recovery, s.SlowestRecovery)
		for _, h := range s.Holds {
			samples[h.Cause] = append(samples[h.Cause], h.Samples...)
		}
	}
	var b strings.Builder
	speaker := "BIRD " + first.BIRD
	if first.External {
		speaker = "an external FRR"
	}
	fmt.Fprintf(&b, "%s, commit %s, %s,\n%s: %d faults, seed %s; %d UPDATEs excused.\n\n",
		first.Date.UTC().Format("2006-01-02"), first.Commit, first.Machine,
		speaker, injected, strings.Join(seeds, ", "), excused)
	b.WriteString("|cause|times|median|p99|longest|bound|beyond|\n|---|---|---|---|---|---|---|\n")
	for _, r := range causes(first.External) {
		b.WriteString(newHold(r.cause, r.bound, samples[r.cause]).markdown())
	}
	longest := short(recovery)
	if recovery > recoveryBound {
		longest = "**" + longest + "**"
	}
	fmt.Fprintf(&b, "|%s||||%s|%s||\n", slowest, longest, short(recoveryBound))
	return b.String(), nil
}

// markdown returns the row of a cause, bold if its bound was missed.
func (h Hold) markdown() string {
	cells := []string{h.Cause, "0", "–", "–", "–", short(h.Bound), "–"}
	if h.Times > 0 {
		cells = []string{
			h.Cause, fmt.Sprint(h.Times), h.cell(h.Median), h.cell(h.P99), h.cell(h.Longest), short(h.Bound),
			fmt.Sprint(h.Exceeded),
		}
	}
	return "|" + strings.Join(cells, "|") + "|\n"
}

// cell formats a value, bold beyond the bound.
func (h Hold) cell(held time.Duration) string {
	if held > h.Bound {
		return "**" + short(held) + "**"
	}
	return short(held)
}

// causes returns the rules of the results: one for each cause. Those of a gateway or VIP differ in
// their subjects only.
func causes(external bool) []rule {
	all := rules(gatewayA, 0, external)
	return slices.CompactFunc(slices.SortedStableFunc(slices.Values(all),
		func(a, b rule) int { return firstOf(all, a.cause) - firstOf(all, b.cause) }),
		func(a, b rule) bool { return a.cause == b.cause })
}

// firstOf returns the index of the first rule with a cause.
func firstOf(all []rule, cause string) int {
	return slices.IndexFunc(all, func(r rule) bool { return r.cause == cause })
}
