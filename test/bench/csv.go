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

// records returns the lines of the report for a CSV file.
func (r *report) records() [][]string {
	var lines [][]string
	for _, m := range r.Results {
		n, ratio := "", ""
		if m.N > 0 {
			n = strconv.Itoa(m.N)
		}
		if m.Ratio > 0 {
			ratio = number(m.Ratio)
		}
		lines = append(lines, []string{
			strconv.Itoa(m.Row), m.What, n, m.Method, strconv.Itoa(m.Count), number(m.Min), number(m.Median),
			number(m.P95), number(m.P99), number(m.Max), m.Unit, ratio, m.Goal, strings.Join(m.Missed, "; "),
			r.Date.UTC().Format("2006-01-02"), r.Commit, fmt.Sprintf("%s, %d cores, Linux %s", r.CPU, r.Cores, r.Kernel),
		})
	}
	return lines
}

// readCSV returns the lines of a CSV file of results, without its head. The file may be absent.
func readCSV(path string) ([][]string, error) {
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
	lines, err := reader.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("results in %s: %w", path, err)
	}
	return lines[min(1, len(lines)):], nil
}

// updateCSV replaces the rows of a CSV file that the report measured.
func (r *report) updateCSV(path string) error {
	lines, err := readCSV(path)
	if err != nil {
		return err
	}
	measured := r.records()
	lines = slices.DeleteFunc(lines, func(line []string) bool {
		return slices.ContainsFunc(measured, func(m []string) bool { return m[0] == line[0] })
	})
	lines = append(lines, measured...)
	slices.SortStableFunc(lines, func(a, b []string) int {
		first, _ := strconv.Atoi(a[0])
		second, _ := strconv.Atoi(b[0])
		return first - second
	})
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("results: %w", err)
	}
	return errors.Join(csv.NewWriter(f).WriteAll(slices.Concat([][]string{csvColumns}, lines)), f.Close())
}
