package vip

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// A Table has the same entries as a map, in any order of insertion, and iterates them in order.
func TestTableIsAnOrderedMap(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	all := make([]VIP, 300)
	for i := range all {
		all[i] = Require(fmt.Sprintf("20.0.%d.%d/32", i/100, i%100))
		if i%3 == 0 {
			all[i] = Require(fmt.Sprintf("2000::%x/128", i+1))
		}
	}
	var table Table[int]
	want := map[VIP]int{}
	for round := range 200 {
		batch := make([]VIP, r.IntN(40))
		for i := range batch {
			batch[i] = all[r.IntN(len(all))] // some twice
		}
		if round%2 == 0 {
			slices.SortFunc(batch, Compare)
		}
		if round%5 == 4 {
			table.DeleteFunc(func(v VIP, _ *int) bool { return slices.Contains(batch, v) })
			maps.DeleteFunc(want, func(v VIP, _ int) bool { return slices.Contains(batch, v) })
		} else {
			table.Add(slices.Values(batch))
			for _, v := range batch {
				*table.Next(v) += round
				want[v] += round
			}
		}
		if table.Len() != len(want) {
			t.Fatalf("round %d: %d VIPs, want %d", round, table.Len(), len(want))
		}
		for _, v := range all {
			n, known := want[v]
			for name, got := range map[string]*int{"Get": table.Get(v), "Next": table.Next(v)} {
				if (got != nil) != known || known && *got != n {
					t.Fatalf("round %d: %s of %s is wrong", round, name, v)
				}
			}
		}
		var order []VIP
		for v, n := range table.All() {
			if order = append(order, v); *n != want[v] {
				t.Fatalf("round %d: %s has %d, want %d", round, v, *n, want[v])
			}
		}
		if !slices.IsSortedFunc(order, Compare) || len(order) != len(want) {
			t.Fatalf("round %d: %d VIPs out of order", round, len(order))
		}
	}
	for range table.All() {
		break // a reader may stop
	}
}

func BenchmarkTable10000VIPs(b *testing.B) {
	all := make([]VIP, 10_000)
	for i := range all {
		all[i] = Require(fmt.Sprintf("20.0.%d.%d/32", i>>8, i&255))
	}
	var table Table[[64]byte]
	table.Add(slices.Values(all))
	b.ReportAllocs()
	for b.Loop() {
		table.Add(slices.Values(all))
		for _, v := range all {
			table.Next(v)[0]++
		}
	}
}
