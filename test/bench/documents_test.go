package main

import (
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
)

const published = "../../docs/performance.csv"

const document = "../../docs/performance.md"

// olderRuns are the commits of rows in the published results that a run of all rows replaces. The
// document names them.
var olderRuns = []string{}

func TestCSVKeepsOtherRows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "results.csv")
	first := testReport()
	harness.Must(t, first.updateCSV(path))
	second := testReport()
	second.Results = second.Results[:1]
	second.Results[0].Row = 3
	harness.Must(t, second.updateCSV(path))
	lines, err := readCSV(path)
	harness.Must(t, err)
	var rows []int
	for _, l := range lines {
		rows = append(rows, l.row)
	}
	if want := []int{1, 1, 1, 3}; !slices.Equal(rows, want) {
		t.Errorf("rows %v, want %v", rows, want)
	}
	harness.Must(t, os.WriteFile(path, []byte("a,b\n"), 0o600))
	if err := first.updateCSV(path); err == nil {
		t.Error("a file with other columns was overwritten")
	}
}

// TestCSVRefusesMixedRuns checks that no part of a run, impossible value or duplicate gets into a
// file of results.
func TestCSVRefusesMixedRuns(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*report)
		want   string
	}{
		"another commit":  {func(r *report) { r.Commit = "0123" }, "is of commit 0123"},
		"another machine": {func(r *report) { r.CPU = "c" }, "measure all rows in one run"},
		"another day":     {func(r *report) { r.Date = time.Unix(86_400, 0) }, "measure all rows in one run"},
		"negative value":  {func(r *report) { r.Results[0].Min = -1067 }, "impossible value -1067 ms"},
		"duplicate":       {func(r *report) { r.Results = append(r.Results, r.Results[0]) }, "occurs twice"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "results.csv")
			harness.Must(t, testReport().updateCSV(path))
			before, err := os.ReadFile(path)
			harness.Must(t, err)
			part := testReport()
			part.Results = part.Results[:1]
			part.Results[0].Row = 3
			c.change(part)
			harness.WantError(t, part.updateCSV(path), c.want)
			after, err := os.ReadFile(path)
			harness.Must(t, err)
			if string(before) != string(after) {
				t.Error("the file was changed")
			}
		})
	}
}

// TestPublishedRun checks that the published results are of one commit on one machine, with
// possible values, and that the document names every older run that remains.
func TestPublishedRun(t *testing.T) {
	lines, err := readCSV(published)
	harness.Must(t, err)
	harness.Check(t, checkRun(lines, olderRuns...))
	text, err := os.ReadFile(document)
	harness.Must(t, err)
	commits, runs := map[string]bool{}, map[string]bool{}
	for _, l := range lines {
		commits[l.commit], runs[l.run()] = true, true
		if !regexp.MustCompile(`^[0-9a-f]{12}$`).MatchString(l.commit) {
			t.Errorf("%s: %q is not a clean commit", l.key(), l.commit)
		}
	}
	for run := range runs {
		if !strings.Contains(string(text), run) {
			t.Errorf("%s does not name %s", document, run)
		}
	}
	for _, commit := range olderRuns {
		if !commits[commit] {
			t.Errorf("no row is of commit %s: remove it from olderRuns", commit)
		}
	}
}

var (
	// citation matches the names of rows of the benchmark.
	citation = regexp.MustCompile(`\b[Rr]ows? (\d+)((?:(?:,| to| and|, and) \d+)*)`)
	// quantity matches a number with the unit of a measurement.
	quantity = regexp.MustCompile(`(\d+(?: \d{3})*(?:\.\d+)?) ?(µs|ms|s|%|×|MiB)(?:[^\w]|$)`)
	integer  = regexp.MustCompile(`\d+`)
)

// has reports whether a row of the results has the value, rounded as it is written, or names it in
// its title or goal.
func has(results []line, rows []string, value, unit string) bool {
	_, fraction, _ := strings.Cut(value, ".")
	scale := math.Pow10(len(fraction))
	want, err := strconv.ParseFloat(strings.ReplaceAll(value, " ", ""), 64)
	if err != nil {
		return false
	}
	units := map[string]float64{"µs": 1e-6, "ms": 1e-3, "s": 1}
	for _, l := range results {
		if !slices.Contains(rows, strconv.Itoa(l.row)) {
			continue
		}
		if strings.Contains(l.what+" "+l.goal, value+" "+unit) || strings.Contains(l.what, value+unit) {
			return true
		}
		values := []string{l.min, l.median, l.p95, l.p99, l.max}
		if unit == "×" {
			values = append(values, l.ratio)
		}
		factor := 1.0
		if units[unit] > 0 && units[l.unit] > 0 {
			factor = units[l.unit] / units[unit]
		} else if unit != l.unit && unit != "×" {
			continue
		}
		for _, text := range values {
			measured, err := strconv.ParseFloat(text, 64)
			if err == nil && math.Abs(measured*factor*scale-want*scale) <= 0.5001 {
				return true
			}
		}
	}
	return false
}

// TestDocumentedNumbers checks the numbers of the benchmark in the documents: a paragraph that names
// rows has only quantities of these rows.
func TestDocumentedNumbers(t *testing.T) {
	results, err := readCSV(published)
	if err != nil || len(results) < 300 {
		t.Fatalf("%d lines of results, %v", len(results), err)
	}
	cited := 0
	err = filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		// The rows of architecture.md are those of the gate's table.
		if filepath.Ext(path) != ".md" || d.Name() == "performance.md" || d.Name() == "architecture.md" {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, paragraph := range regexp.MustCompile(`\n\n|\n- `).Split(string(text), -1) {
			var rows []string
			for _, m := range citation.FindAllStringSubmatch(paragraph, -1) {
				rows = append(rows, m[1])
				rows = append(rows, integer.FindAllString(m[2], -1)...)
			}
			if len(rows) == 0 || strings.HasPrefix(strings.TrimSpace(paragraph), "|") {
				continue
			}
			for _, m := range quantity.FindAllStringSubmatch(strings.ReplaceAll(paragraph, "\n", " "), -1) {
				cited++
				if !has(results, rows, m[1], m[2]) {
					t.Errorf("%s: %s %s is not in rows %v of %s", path, m[1], m[2], rows, published)
				}
			}
		}
		return nil
	})
	harness.Must(t, err)
	if cited < 15 {
		t.Errorf("found only %d numbers of the benchmark", cited)
	}
}

// TestPerformanceTable checks that the document has the table of the published results, in which a
// missed goal is bold.
func TestPerformanceTable(t *testing.T) {
	if err := updateDocument(document, published, *update); err != nil {
		t.Errorf("%v: bin/bench --from=bin/bench.json --csv=docs/performance.csv --document=docs/performance.md", err)
	}
}

// TestMissedGoalsAreShown checks the table's lines: a missed goal is in it, in bold, also if the table
// does not list its measurement, and so is each measurement that a run lacks.
func TestMissedGoalsAreShown(t *testing.T) {
	lines := []line{
		{
			row: 12, what: "lb: peak resident memory", n: "10000", method: vipgate, median: "67.8", p99: "69.1", unit: "MiB",
			missed: "max ≤ 40",
		},
		{row: 1, what: oneFlips, n: "1", method: vipgate, median: "0.6", p99: "0.9", unit: "ms"},
		{row: 1, what: oneFlips, n: "1", method: reference, median: "2.5", p99: "4", unit: "ms"},
		{
			row: 18, what: forwardRatio, n: "10", method: forwardLoose, median: "1.6", p99: "2", unit: "×",
			missed: "median ≤ 1.25",
		},
	}
	text := markdown(lines)
	for _, want := range []string{
		"|12|lb: peak memory (≤ 40)|10000|**67.8 MiB**||\n",
		"|1|one VIP flips → UPDATE|1|0.6/0.9 ms|2.5 ms|\n",
		"|18|the same, `--conntrack=loose` (≤ 1.25)|10|**1.6/2 ×**||\n",
		"|2|all go down → last UPDATE|10000|not measured||\n",
	} {
		if strings.Count(text, want) != 1 {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
}

// TestTableHasEveryRow checks that the table has each row of the benchmark.
func TestTableHasEveryRow(t *testing.T) {
	for _, r := range rows {
		if !slices.ContainsFunc(table, func(s shown) bool { return s.row == r.number }) {
			t.Errorf("the table has no line of row %d", r.number)
		}
	}
}
