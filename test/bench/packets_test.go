package main

import (
	"fmt"
	"slices"
	"testing"
)

func TestTrafficSpread(t *testing.T) {
	for _, c := range []struct {
		vips, peers int
		first, last string
	}{
		{0, 1, "20.0.0.1", "20.0.0.1"}, // an address like any other
		{1, 1, "20.0.0.1", "20.0.0.1"},
		{3, 3, "20.0.0.1", "20.0.0.3"},
		{1000, maxPeers, "20.0.0.1", "20.0.3.170"},
		{10_000, maxPeers, "20.0.0.1", "20.0.36.160"},
	} {
		t.Run(fmt.Sprint(c.vips), func(t *testing.T) {
			peers := peersOf(c.vips)
			if len(peers) != c.peers || peers[0].String() != c.first || peers[len(peers)-1].String() != c.last {
				t.Errorf("%v, want %d from %s to %s", peers, c.peers, c.first, c.last)
			}
		})
	}
}

func TestBeside(t *testing.T) {
	// The second round was twice as slow for all.
	if got := beside([]float64{11, 22, 12}, []float64{10, 20, 10}); !slices.Equal(got, []float64{1.1, 1.1, 1.2}) {
		t.Errorf("beside = %v", got)
	}
}

func TestMiddle(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}} {
		before := slices.Clone(c.values)
		if got := middle(c.values); got != c.want || !slices.Equal(c.values, before) {
			t.Errorf("middle of %v = %v, want %v", before, got, c.want)
		}
	}
}
