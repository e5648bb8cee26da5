package main

import (
	"cmp"
	"encoding/json"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"

	"github.com/vipgate/vipgate/test/machine"
)

// Measurement is the samples of one quantity with one method.
type Measurement struct {
	Row    int    `json:"row"`
	What   string `json:"what"`
	Method string `json:"method"` // vipgate, reference, or another technique
	N      int    `json:"n"`      // VIPs; 0 if the result does not depend on them
	Unit   string `json:"unit"`
	// Goal is the goal as text. Clauses such as "median ≤ 0.5" in it, in the unit of the samples,
	// are compared with the summary.
	Goal string `json:"goal,omitempty"`
	// Against is the method whose median Ratio compares with this one's; "" for reference.
	Against string    `json:"against,omitempty"`
	Samples []float64 `json:"samples,omitempty"`
}

// Summary holds the statistics of a measurement. Percentiles use the nearest rank: they are
// measured values.
type Summary struct {
	Count  int     `json:"count"`
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	P95    float64 `json:"p95"`
	P99    float64 `json:"p99"`
	Max    float64 `json:"max"`
}

// result is a measurement with its evaluation.
type result struct {
	Measurement
	Summary
	// Ratio is the reference's median divided by this one's, the speed-up, or this one's median
	// divided by that of the method in Against, the cost. 0 without a result of the other method with
	// the same Row, What and N.
	Ratio float64 `json:"ratio,omitempty"`
	// Missed lists the clauses of the goal that do not hold.
	Missed []string `json:"missed,omitempty"`
}

type note struct {
	Row  int    `json:"row"`
	Text string `json:"text"`
}

type failure struct {
	Row   int    `json:"row"`
	Error string `json:"error"`
}

type measuredRow struct {
	Row     int     `json:"row"`
	Title   string  `json:"title"`
	Seconds float64 `json:"seconds"`
	Load    string  `json:"load"` // load average after it
}

// report holds all results of a run.
type report struct {
	machine.Machine
	Quick      bool          `json:"quick"`
	LoadBefore string        `json:"load_before"`
	LoadAfter  string        `json:"load_after"`
	Seconds    float64       `json:"seconds"`
	Rows       []measuredRow `json:"rows"`
	Results    []*result     `json:"results"`
	Notes      []note        `json:"notes,omitempty"`
	Failures   []failure     `json:"failures,omitempty"`
}

// summarize computes the fields that depend on all results.
func (r *report) summarize() {
	for _, m := range r.Results {
		against := cmp.Or(m.Against, reference)
		for _, other := range r.Results {
			if m.Method == against || other.Method != against || other.Row != m.Row || other.What != m.What ||
				other.N != m.N || m.Median <= 0 || other.Median <= 0 {
				continue
			}
			m.Ratio = other.Median / m.Median
			if m.Against != "" {
				m.Ratio = m.Median / other.Median
			}
		}
		m.Missed = missed(m.Goal, m.Summary, m.Ratio)
	}
}

func summarize(samples []float64) Summary {
	if len(samples) == 0 {
		return Summary{}
	}
	sorted := slices.Sorted(slices.Values(samples))
	return Summary{
		Count: len(sorted), Min: sorted[0], Max: sorted[len(sorted)-1],
		Median: percentile(sorted, 50), P95: percentile(sorted, 95), P99: percentile(sorted, 99),
	}
}

// percentile returns the smallest value that p percent of the values do not exceed.
func percentile(sorted []float64, p float64) float64 {
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// clause matches a clause of a goal that can be compared with numbers.
var clause = regexp.MustCompile(`(min|median|p95|p99|max|ratio) (?:≤|<=) ([0-9.]+)`)

// missed returns the clauses of a goal that do not hold.
func missed(goal string, s Summary, ratio float64) []string {
	if s.Count == 0 {
		return nil
	}
	values := map[string]float64{
		"min": s.Min, "median": s.Median, "p95": s.P95, "p99": s.P99, "max": s.Max, "ratio": ratio,
	}
	var found []string
	for _, m := range clause.FindAllStringSubmatch(goal, -1) {
		if limit, err := strconv.ParseFloat(m[2], 64); err == nil && values[m[1]] > limit {
			found = append(found, m[0])
		}
	}
	return found
}

func (r *report) writeJSON(w io.Writer, samples bool) error {
	shown := *r
	if !samples {
		shown.Results = nil
		for _, m := range r.Results {
			without := *m
			without.Samples = nil
			shown.Results = append(shown.Results, &without)
		}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(shown)
}
