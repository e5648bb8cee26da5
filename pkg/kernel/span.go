package kernel

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"

	"github.com/google/nftables"

	"github.com/vipgate/vipgate/pkg/vip"
)

// span is a range of addresses of one family, both ends included.
type span struct{ first, last netip.Addr }

func spanOf(p netip.Prefix) span { return span{p.Addr(), vip.Last(p)} }

func (s span) covers(t span) bool {
	return s.first.Compare(t.first) <= 0 && t.last.Compare(s.last) <= 0
}

func compareSpans(a, b span) int {
	// Of two spans with the same start the wider comes first.
	return cmp.Or(a.first.Compare(b.first), b.last.Compare(a.last))
}

// disjoint returns, in order, the ranges of a family's VIPs without the ranges that another one
// contains, because an interval set refuses overlaps. Adjacent ranges stay separate, so that
// adding a VIP never rewrites the range of another VIP.
func disjoint(vips vip.Set, family vip.Family) []span {
	sorted := make([]vip.VIP, 0, len(vips))
	for v := range vips {
		if v.Family() == family && !v.IsZero() {
			sorted = append(sorted, v)
		}
	}
	slices.SortFunc(sorted, vip.Compare) // wider ones first
	out := make([]span, 0, len(sorted))
	for _, v := range sorted {
		if s := spanOf(v.Prefix()); len(out) == 0 || !out[len(out)-1].covers(s) {
			out = append(out, s)
		}
	}
	return out
}

// covered reports whether sorted, disjoint spans together contain all addresses of s.
func covered(spans []span, s span) bool {
	i, _ := slices.BinarySearchFunc(spans, s.first, func(t span, a netip.Addr) int { return t.last.Compare(a) })
	for _, t := range spans[i:] {
		switch {
		case s.first.Less(t.first):
			return false
		case t.covers(s):
			return true
		}
		s.first = t.last.Next()
	}
	return false
}

// change is one transaction on a set: add replaces del.
type change struct{ del, add []span }

// steps returns the transactions that lead from have to want, both disjoint: first additions,
// then swaps of overlapping ranges, last deletions.
func steps(have, want []span) []change {
	surplus := without(have, want)
	differ := slices.Concat(surplus, without(want, have))
	slices.SortFunc(differ, compareSpans)
	var add, del []span
	var swaps []change
	for len(differ) > 0 {
		// Collect in c the first range and all ranges connected to it by overlaps.
		var c change
		for reach := differ[0].last; len(differ) > 0 && differ[0].first.Compare(reach) <= 0; differ = differ[1:] {
			if reach.Less(differ[0].last) {
				reach = differ[0].last
			}
			if _, found := slices.BinarySearchFunc(surplus, differ[0], compareSpans); found {
				c.del = append(c.del, differ[0])
			} else {
				c.add = append(c.add, differ[0])
			}
		}
		switch {
		case c.del == nil:
			add = append(add, c.add...)
		case c.add == nil:
			del = append(del, c.del...)
		default:
			swaps = append(swaps, c)
		}
	}
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
func without(a, b []span) []span {
	return slices.DeleteFunc(slices.Clone(a), func(s span) bool {
		_, found := slices.BinarySearchFunc(b, s, compareSpans)
		return found
	})
}

// elements encodes each span as its first address and an interval end, the address after the
// last. A span up to the last address of the family has no end.
func elements(spans []span) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, 2*len(spans))
	for _, s := range spans {
		out = append(out, nftables.SetElement{Key: s.first.AsSlice()})
		if end := s.last.Next(); end.IsValid() {
			out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}

// spans decodes elements into sorted spans; it sorts elems. A span without an interval end
// extends to the next element.
func spans(elems []nftables.SetElement) []span {
	slices.SortFunc(elems, func(a, b nftables.SetElement) int {
		switch c := bytes.Compare(a.Key, b.Key); {
		case c != 0 || a.IntervalEnd == b.IntervalEnd:
			return c
		case a.IntervalEnd:
			return -1
		}
		return 1
	})
	out := make([]span, 0, (len(elems)+1)/2) // only a span up to the last address has no end
	for i, e := range elems {
		if e.IntervalEnd {
			continue
		}
		at, _ := netip.AddrFromSlice(e.Key) // keys of an address set are always valid addresses
		s := span{at, vip.Last(netip.PrefixFrom(at, 0))}
		if i+1 < len(elems) {
			end, _ := netip.AddrFromSlice(elems[i+1].Key)
			s.last = end.Prev()
		}
		out = append(out, s)
	}
	return out
}
