package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"
)

// Methods of all rows. A row may define further methods.
const (
	vipgate   = "vipgate"
	reference = "reference"
)

// row is one claim and its measurement.
type row struct {
	number  int
	title   string
	measure func(ctx context.Context, s *session) error
}

// session is one run of the benchmark: its options and its report. It is not safe for concurrent
// use.
type session struct {
	quick        bool
	vips         []int  // see vipCounts
	binaries     string // the folder of lb and frontend
	repeatsScale float64
	report       *report
	progress     func(text string)
}

// record adds a measurement to the report.
func (s *session) record(m Measurement) {
	s.report.Results = append(s.report.Results, &result{Measurement: m, Summary: summarize(m.Samples)})
	last := s.report.Results[len(s.report.Results)-1]
	s.progress(fmt.Sprintf("  %s, %s, N=%d: median %s, p99 %s, max %s %s (%d)",
		m.What, m.Method, m.N, number(last.Median), number(last.P99), number(last.Max), m.Unit, last.Count))
}

// note adds a note to the numbers of a row.
func (s *session) note(row int, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.report.Notes = append(s.report.Notes, note{Row: row, Text: text})
	s.progress("  note: " + text)
}

// repeats returns the number of measurements: full, scaled, or quick in a quick run.
func (s *session) repeats(full, quick int) int {
	if s.quick {
		return quick
	}
	return max(1, int(math.Round(float64(full)*s.repeatsScale)))
}

// sizes returns the numbers of VIPs to measure with.
func (s *session) sizes(full, quick []int) []int {
	if s.quick {
		return quick
	}
	return full
}

// vipCounts returns the numbers of VIPs of rows 1 and 2: the default sizes, or the selected
// ones.
func (s *session) vipCounts() []int {
	counts := s.sizes([]int{1, 100, 1000, 10_000, 50_000}, []int{1, 1000})
	if len(s.vips) == 0 {
		return counts
	}
	return slices.DeleteFunc(counts, func(n int) bool { return !slices.Contains(s.vips, n) })
}

// lasts returns the duration of a measurement, full or quick.
func (s *session) lasts(full, quick time.Duration) time.Duration {
	if s.quick {
		return quick
	}
	return full
}

// milliseconds converts a duration to a sample in ms.
func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
