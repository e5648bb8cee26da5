package main

import (
	"slices"
	"strings"
	"testing"
)

func TestSumsOfMetrics(t *testing.T) {
	for _, c := range []struct {
		text string
		want []float64 // nil: an error
	}{
		{"# HELP x{ 9\nx{a=\"1\"} 3\nx{a=\"b c\"} 4\ny{a=\"1\"} 7\nxy{} 5\n", []float64{7, 0}},
		{"x{} 1e+04\nz_sum 0.25\n", []float64{10_000, 0.25}},
		{"", []float64{0, 0}},
		{"x{} many\n", nil},
	} {
		got, err := sumsOf(strings.NewReader(c.text), []string{"x{", "z_sum"})
		if !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) {
			t.Errorf("sums of %q are %v, %v; want %v", c.text, got, err, c.want)
		}
	}
}
