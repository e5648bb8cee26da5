package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// csvColumns are the columns of the published results, docs/performance.csv.
var csvColumns = []string{
	"row", "what", "n", "method", "count", "min", "median", "p95", "p99", "max", "unit", "ratio", "goal", "missed",
	"date", "commit", "machine",
}

// line is a line of the published results.
type line struct {
	row                       int
	what, n, method           string
	count                     string
	min, median, p95, p99     string
	max, unit, ratio          string
	goal, missed              string
	date, commit, machineName string
}

func lineOf(fields []string) (line, error) {
	row, err := strconv.Atoi(fields[0])
	if err != nil {
		return line{}, fmt.Errorf("row %q: %w", fields[0], err)
	}
	f := fields
	return line{
		row, f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15], f[16],
	}, nil
}

func (l line) fields() []string {
	return []string{
		strconv.Itoa(l.row), l.what, l.n, l.method, l.count, l.min, l.median, l.p95, l.p99, l.max, l.unit, l.ratio, l.goal,
		l.missed, l.date, l.commit, l.machineName,
	}
}

// run returns the run that measured the line.
func (l line) run() string { return fmt.Sprintf("commit %s, %s, %s", l.commit, l.date, l.machineName) }

// key identifies a measurement in a run.
func (l line) key() string { return fmt.Sprintf("row %d, %s, N=%s, %s", l.row, l.what, l.n, l.method) }

// published returns the lines of the report for a CSV file.
func (r *report) published() []line {
	var lines []line
	for _, m := range r.Results {
		n, ratio := "", ""
		if m.N > 0 {
			n = strconv.Itoa(m.N)
		}
		if m.Ratio > 0 {
			ratio = number(m.Ratio)
		}
		lines = append(lines, line{
			m.Row, m.What, n, m.Method, strconv.Itoa(m.Count), number(m.Min), number(m.Median),
			number(m.P95), number(m.P99), number(m.Max), m.Unit, ratio, m.Goal, strings.Join(m.Missed, "; "),
			r.Date.UTC().Format("2006-01-02"), r.Commit, r.Machine.String(),
		})
	}
	return lines
}

// readCSV returns the lines of a CSV file of results, without its head. The file may be absent.
func readCSV(path string) ([]line, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("results: %w", err)
	}
	defer f.Close()
	reader := csv.NewReader(f)
	reader.FieldsPerRecord = len(csvColumns)
	records, err := reader.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("results in %s: %w", path, err)
	}
	var lines []line
	for _, fields := range records[min(1, len(records)):] {
		l, err := lineOf(fields)
		if err != nil {
			return nil, fmt.Errorf("results in %s: %w", path, err)
		}
		lines = append(lines, l)
	}
	return lines, nil
}

// checkRun returns an error unless the lines are of one run, each once, and have possible values.
// Lines of the accepted commits may be of other runs.
func checkRun(lines []line, accepted ...string) error {
	var errs []error
	seen, first := map[string]bool{}, ""
	for _, l := range lines {
		if seen[l.key()] {
			errs = append(errs, fmt.Errorf("%s occurs twice", l.key()))
		}
		seen[l.key()] = true
		for _, text := range []string{l.min, l.median, l.p95, l.p99, l.max} {
			if v, err := strconv.ParseFloat(text, 64); err != nil || v < 0 {
				errs = append(errs, fmt.Errorf("%s has the impossible value %s %s", l.key(), text, l.unit))
			}
		}
		switch {
		case slices.Contains(accepted, l.commit):
		case first == "":
			first = l.run()
		case l.run() != first:
			errs = append(errs, fmt.Errorf("%s is of %s, other lines of %s: measure all rows in one run", l.key(), l.run(),
				first))
			first = l.run() // reports each change once
		}
	}
	return errors.Join(errs...)
}

// updateCSV replaces the rows of a CSV file that the report measured. It refuses to mix runs.
func (r *report) updateCSV(path string) error {
	lines, err := readCSV(path)
	if err != nil {
		return err
	}
	measured := r.published()
	lines = slices.DeleteFunc(lines, func(old line) bool {
		return slices.ContainsFunc(measured, func(l line) bool { return l.row == old.row })
	})
	lines = append(lines, measured...)
	slices.SortStableFunc(lines, func(a, b line) int { return a.row - b.row })
	if err := checkRun(lines); err != nil {
		return fmt.Errorf("results in %s are unchanged: %w", path, err)
	}
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	records := [][]string{csvColumns}
	for _, l := range lines {
		records = append(records, l.fields())
	}
	return errors.Join(csv.NewWriter(f).WriteAll(records), f.Close())
}
