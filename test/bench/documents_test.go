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

	"github.com/vipgate/vipgate/test/harness"
)

const published = "../../docs/performance.csv"

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
	var rows []string
	for _, line := range lines {
		rows = append(rows, line[0])
	}
	if want := []string{"1", "1", "1", "3"}; !slices.Equal(rows, want) {
		t.Errorf("rows %v, want %v", rows, want)
	}
	harness.Must(t, os.WriteFile(path, []byte("a,b\n"), 0o600))
	if err := first.updateCSV(path); err == nil {
		t.Error("a file with other columns was overwritten")
	}
}

var (
	// citation matches the names of rows of the benchmark.
	citation = regexp.MustCompile(`\b[Rr]ows? (\d+)((?:(?:,| to| and|, and) \d+)*)`)
	// quantity matches a number with the unit of a measurement.
	quantity = regexp.MustCompile(`(\d+(?: \d{3})*(?:\.\d+)?) ?(µs|ms|s|%|×|MiB)(?:[^\w]|$)`)
	integer  = regexp.MustCompile(`\d+`)
	// tableLine matches a line of the table: row, straight injection, N, missed, median, p99, unit, and
	// the cell of the reference.
	tableLine = regexp.MustCompile(`^\| (\d+) \| .*?(injection .*?)?\| (\d+) \| (\*\*)?([\d.]+)(?: / ([\d.]+))? ` +
		`(\S+?)(?:\*\*)? \|(.*?)\|`)
)

// has reports whether a row of the results has the value, rounded as it is written, or names it in
// its title or goal.
func has(results [][]string, rows []string, value, unit string) bool {
	_, fraction, _ := strings.Cut(value, ".")
	scale := math.Pow10(len(fraction))
	want, err := strconv.ParseFloat(strings.ReplaceAll(value, " ", ""), 64)
	if err != nil {
		return false
	}
	units := map[string]float64{"µs": 1e-6, "ms": 1e-3, "s": 1}
	for _, line := range results {
		if !slices.Contains(rows, line[0]) {
			continue
		}
		if strings.Contains(line[1]+" "+line[12], value+" "+unit) || strings.Contains(line[1], value+unit) {
			return true
		}
		values := slices.Clone(line[5:10])
		if unit == "×" {
			values = append(values, line[11])
		}
		factor := 1.0
		if units[unit] > 0 && units[line[10]] > 0 {
			factor = units[line[10]] / units[unit]
		} else if unit != line[10] && unit != "×" {
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

// TestPerformanceTable compares the table of docs/performance.md with the published results: the
// median and p99 of vipgate, the median of the reference, and the missed goals.
func TestPerformanceTable(t *testing.T) {
	results, err := readCSV(published)
	harness.Must(t, err)
	text, err := os.ReadFile("../../docs/performance.md")
	harness.Must(t, err)
	covered := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		match := tableLine.FindStringSubmatch(line)
		if match == nil {
			continue
		}
		row, injection, n, missed, median, p99, unit, reference := match[1], match[2], match[3], match[4] != "",
			match[5], match[6], match[7], match[8]
		covered[row] = true
		at := slices.IndexFunc(results, func(r []string) bool {
			return r[0] == row && r[2] == n && r[6] == median && (p99 == "" || r[8] == p99) && r[10] == unit &&
				(strings.HasPrefix(r[3], vipgate) || strings.HasPrefix(r[3], "NSP"))
		})
		if at < 0 {
			t.Errorf("row %s, N=%s: %s / %s %s is not in %s", row, n, median, p99, unit, published)
			continue
		}
		if isMissed := results[at][13] != ""; missed != isMissed {
			t.Errorf("row %s, N=%s, %s: the goal is marked as missed: %v, want %v", row, n, median, missed, isMissed)
		}
		for _, m := range quantity.FindAllStringSubmatch(injection+" "+reference, -1) {
			other := slices.ContainsFunc(results, func(r []string) bool {
				return r[0] == row && r[2] == n && r[6] == m[1] && r[10] == m[2] && !strings.HasPrefix(r[3], vipgate)
			})
			if !other {
				t.Errorf("row %s, N=%s: %s %s is the median of no other method", row, n, m[1], m[2])
			}
		}
	}
	for _, r := range results {
		if !covered[r[0]] {
			t.Errorf("the table has no line of row %s", r[0])
			covered[r[0]] = true
		}
	}
}
