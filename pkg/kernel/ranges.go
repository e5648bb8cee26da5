package kernel

import (
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
)

// disjoint returns, in order, the ranges of a family's VIPs without the ranges that another one
// contains, because an interval set refuses overlaps. Adjacent ranges stay separate, so that
// adding a VIP never rewrites the range of another VIP.
func disjoint(vips vip.Set, family vip.Family) []nft.Range {
	sorted := make([]vip.VIP, 0, len(vips))
	for address := range vips {
		if address.Family() == family && !address.IsZero() {
			sorted = append(sorted, address)
		}
	}
	slices.SortFunc(sorted, vip.Compare) // wider ones first
	out := make([]nft.Range, 0, len(sorted))
	for _, address := range sorted {
		if interval := nft.RangeOf(address.Prefix()); len(out) == 0 || !out[len(out)-1].Covers(interval) {
			out = append(out, interval)
		}
	}
	return out
}

// covered reports whether sorted, disjoint ranges together contain all addresses of wanted.
func covered(spans []nft.Range, wanted nft.Range) bool {
	index, _ := slices.BinarySearchFunc(spans, wanted.First, func(r nft.Range, first netip.Addr) int {
		return r.Last.Compare(first)
	})
	for _, interval := range spans[index:] {
		switch {
		case wanted.First.Less(interval.First):
			return false
		case interval.Covers(wanted):
			return true
		}
		wanted.First = interval.Last.Next()
	}
	return false
}

// change is one transaction on a set: add replaces del.
type change struct{ del, add []nft.Range }

// steps returns the transactions that lead from have to want, both disjoint: first additions,
// then swaps of overlapping ranges, last deletions.
func steps(have, want []nft.Range) []change {
	surplus := without(have, want)
	differ := slices.Concat(surplus, without(want, have))
	// Sort by the first address, so that overlapping ranges of both lists are adjacent.
	slices.SortFunc(differ, nft.Range.Compare)
	var add, del []nft.Range
	var swaps []change
	for len(differ) > 0 {
		// Collect in c the first range and all ranges connected to it by overlaps.
		var connected change
		for reach := differ[0].Last; len(differ) > 0 && differ[0].First.Compare(reach) <= 0; differ = differ[1:] {
			if reach.Less(differ[0].Last) {
				reach = differ[0].Last
			}
			if _, found := slices.BinarySearchFunc(surplus, differ[0], nft.Range.Compare); found {
				connected.del = append(connected.del, differ[0])
			} else {
				connected.add = append(connected.add, differ[0])
			}
		}
		switch {
		// Only overlapping ranges must change in one transaction: the set rejects overlaps.
		case connected.del == nil:
			add = append(add, connected.add...)
		case connected.add == nil:
			del = append(del, connected.del...)
		default:
			swaps = append(swaps, connected)
		}
	}
	// Additions precede deletions, so that no VIP loses its range temporarily.
	var out []change
	for part := range slices.Chunk(add, spansPerBatch) {
		out = append(out, change{add: part})
	}
	out = append(out, swaps...)
	for part := range slices.Chunk(del, spansPerBatch) {
		out = append(out, change{del: part})
	}
	return out
}

// without returns the spans of a that are not in b; both are sorted.
func without(a, b []nft.Range) []nft.Range {
	return slices.DeleteFunc(slices.Clone(a), func(interval nft.Range) bool {
		_, found := slices.BinarySearchFunc(b, interval, nft.Range.Compare)
		return found
	})
}

func elements(ranges []nft.Range) []nft.Element {
	list := make([]nft.Element, 0, 2*len(ranges))
	for _, r := range ranges {
		list = append(list, r.Elements()...)
	}
	return list
}
