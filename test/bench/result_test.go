package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/machine"
)

func TestSummaryByNearestRank(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}
	for _, test := range []struct {
		name    string
		samples []float64
		want    Summary
	}{
		{"none", nil, Summary{}},
		{"one", []float64{7}, Summary{1, 7, 7, 7, 7, 7}},
		{"two", []float64{9, 1}, Summary{2, 1, 1, 9, 9, 9}},
		{"three", []float64{3, 1, 2}, Summary{3, 1, 2, 3, 3, 3}},
		{"hundred", hundred, Summary{100, 1, 50, 95, 99, 100}},
	} {
		before := slices.Clone(test.samples)
		if got := summarize(test.samples); got != test.want {
			t.Errorf("%s: got %+v, want %+v", test.name, got, test.want)
		}
		if !slices.Equal(before, test.samples) {
			t.Errorf("%s: the samples were put into order", test.name)
		}
	}
}

func TestMissedClausesOfAGoal(t *testing.T) {
	s := Summary{Count: 10, Min: 1, Median: 2, P95: 3, P99: 4, Max: 5}
	for goal, want := range map[string]string{
		"":                             "",
		"drain time + 3 s":             "",
		"median ≤ 2, p99 ≤ 4":          "",
		"median ≤ 1.5, p99 ≤ 10":       "median ≤ 1.5",
		"p95 <= 2.9; max ≤ 4":          "p95 <= 2.9, max ≤ 4",
		"min ≤ 0.5 and what is beside": "min ≤ 0.5",
		"ratio ≤ 1.1":                  "ratio ≤ 1.1",
		"ratio ≤ 1.2":                  "",
	} {
		if got := strings.Join(missed(goal, s, 1.2), ", "); got != want {
			t.Errorf("goal %q: missed %q, want %q", goal, got, want)
		}
	}
	if got := missed("max ≤ 0", Summary{}, 0); got != nil {
		t.Errorf("what was not measured missed %v", got)
	}
}

func testReport() *report {
	s := &session{report: &report{Machine: machine.Machine{
		Date: time.Unix(0, 0), Command: []string{"bench", "--rows=1"},
		CPU: "a | b", Cores: 2,
	}}, progress: func(string) {}}
	s.record(
		Measurement{
			Row: 1, What: "flip", Method: vipgate, N: 10, Unit: "ms", Goal: "median ≤ 1",
			Samples: []float64{2, 2},
		},
	)
	s.record(Measurement{Row: 1, What: "flip", Method: reference, N: 10, Unit: "ms", Samples: []float64{150}})
	s.record(Measurement{Row: 1, What: "flip", Method: vipgate, N: 20, Unit: "ms", Samples: []float64{0.25}})
	s.note(1, "the reference is slow")
	s.report.Failures = []failure{{Row: 2, Error: "two\nlines"}}
	s.report.summarize()
	return s.report
}

func TestRatio(t *testing.T) {
	r := testReport()
	var got []float64
	for _, m := range r.Results {
		got = append(got, m.Ratio)
	}
	if !slices.Equal(got, []float64{75, 0, 0}) {
		t.Errorf("ratios %v", got)
	}
}

func TestRatioAgainst(t *testing.T) {
	r := &report{}
	for _, m := range []Measurement{
		{Method: viaMeridio, Against: viaFile, Samples: []float64{4}},
		{Method: viaFile, Samples: []float64{2}},
		{Method: viaFile, Against: viaFile, Samples: []float64{2}}, // not against itself
		{Method: reference, Samples: []float64{8}},
	} {
		r.Results = append(r.Results, &result{Measurement: m, Summary: summarize(m.Samples)})
	}
	r.summarize()
	var got []float64
	for _, m := range r.Results {
		got = append(got, m.Ratio)
	}
	if want := []float64{2, 4, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("ratios %v, want %v", got, want)
	}
}

func TestTextTable(t *testing.T) {
	var b bytes.Buffer
	harness.Must(t, testReport().writeText(&b))
	for _, line := range []string{
		"#  what  N   method     count  min    median  p95    p99    max    unit  ratio  goal",
		"1  flip  10  vipgate    2      2.00   2.00    2.00   2.00   2.00   ms    75.0×  median ≤ 1 (missed: median ≤ 1)",
		"1  flip  20  vipgate    1      0.250  0.250   0.250  0.250  0.250  ms",
		"row 1: the reference is slow",
		"row 2 FAILED: two\nlines",
		"command: bench --rows=1",
	} {
		if !strings.Contains(b.String(), line) {
			t.Errorf("%q is missing in\n%s", line, b.String())
		}
	}
}

func TestJSONSamples(t *testing.T) {
	r := testReport()
	for _, samples := range []bool{false, true} {
		var b bytes.Buffer
		harness.Must(t, r.writeJSON(&b, samples))
		var got struct {
			CPU     string
			Results []struct {
				Row     int
				Method  string
				Median  float64
				Ratio   float64
				Samples []float64
				Missed  []string
			}
		}
		harness.Must(t, json.Unmarshal(b.Bytes(), &got))
		first := got.Results[0]
		if first.Row != 1 || first.Method != vipgate || first.Median != 2 || first.Ratio != 75 ||
			len(first.Missed) != 1 || got.CPU != "a | b" {
			t.Errorf("read %+v", got)
		}
		if has := len(first.Samples) > 0; has != samples {
			t.Errorf("samples: %t, want %t", has, samples)
		}
	}
	if len(r.Results[0].Samples) != 2 {
		t.Error("writing took the samples away")
	}
}

func TestNumberFormat(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 0.0426: "0.043", 1.234: "1.23", 56.78: "56.8", 1234.5: "1234",
		math.Pi * 100: "314",
	} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %s, want %s", v, got, want)
		}
	}
}

func TestFailedRow(t *testing.T) {
	s := &session{report: &report{}, progress: func(string) {}}
	table := []row{
		{1, "fails", func(context.Context, *session) error { return errors.New("no luck") }},
		{2, "is not asked for", func(context.Context, *session) error { t.Error("row 2 was measured"); return nil }},
		{3, "works", func(_ context.Context, s *session) error {
			s.record(Measurement{Row: 3, Samples: []float64{1}})
			return nil
		}},
	}
	measureRows(t.Context(), s, table, []int{1, 3})
	if len(s.report.Results) != 1 || len(s.report.Failures) != 1 ||
		s.report.Failures[0] != (failure{Row: 1, Error: "no luck"}) || len(s.report.Rows) != 2 {
		t.Errorf("report %+v", s.report)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.report = &report{}
	measureRows(ctx, s, table, nil)
	if len(s.report.Failures) != 3 {
		t.Errorf("after an interruption: %+v", s.report.Failures)
	}
}

func TestRepeatsAndSizes(t *testing.T) {
	full, quick := &session{repeatsScale: 0.01}, &session{quick: true, repeatsScale: 5}
	if a, b, c := full.repeats(200, 3), full.repeats(10, 3), quick.repeats(200, 3); a != 2 || b != 1 || c != 3 {
		t.Errorf("repeats %d, %d, %d", a, b, c)
	}
	if a, b := full.sizes([]int{9}, []int{1}), quick.sizes([]int{9}, []int{1}); a[0] != 9 || b[0] != 1 {
		t.Errorf("sizes %v, %v", a, b)
	}
	full.vips = []int{10_000, 1, 7}
	if got := full.vipCounts(); !slices.Equal(got, []int{1, 10_000}) {
		t.Errorf("numbers of VIPs: %v", got)
	}
}

func TestCommandLine(t *testing.T) {
	for _, test := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"--quick", "--rows=1,2", "--json=x"}, exitMeasured, ""},
		{[]string{"--rows=99"}, exitUsage, "there is no row 99"},
		{[]string{"--from=x"}, exitUsage, "--plots"},
		{[]string{"--repeats-scale=0"}, exitUsage, "not above 0"},
		{[]string{"--rows=x"}, exitUsage, "--rows"},
		{[]string{"extra"}, exitUsage, "extra"},
		{[]string{"--help"}, exitMeasured, ""},
	} {
		var out, errs bytes.Buffer
		o, status, done := parse(test.args, &out, &errs)
		if status != test.status || !strings.Contains(errs.String(), test.says) ||
			done != (status != exitMeasured || test.args[0] == "--help") {
			t.Errorf("%q: status %d, done %t, says %q", test.args, status, done, errs.String())
		}
		if status == exitMeasured && !done &&
			(!o.Quick || !slices.Equal(o.Rows, []int{1, 2}) || o.Binaries != "bin" || o.RepeatsScale != 1) {
			t.Errorf("%q: options %+v", test.args, o)
		}
	}
}
