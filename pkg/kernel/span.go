package kernel

import (
	"bytes"
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"

	"github.com/vipgate/vipgate/pkg/vip"
)

// span is a range of addresses of one family, both ends included.
type span struct{ first, last netip.Addr }

func spanOf(p netip.Prefix) span {
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(last)
	return span{p.Addr(), a}
}

func (s span) covers(t span) bool {
	return s.first.Compare(t.first) <= 0 && t.last.Compare(s.last) <= 0
}

func compareSpans(a, b span) int {
	// Of two that begin together the wider comes first.
	return cmp.Or(a.first.Compare(b.first), b.last.Compare(a.last))
}

// disjoint returns, in order, the ranges of the VIPs of one family without those that lie in
// another one: an interval set refuses overlaps. Adjacent ranges stay separate, so that adding one
// VIP never rewrites the range of another one.
func disjoint(vips vip.Set, family vip.Family) []span {
	var all []span
	for v := range vips {
		if v.Family() == family && !v.IsZero() {
			all = append(all, spanOf(v.Prefix()))
		}
	}
	slices.SortFunc(all, compareSpans)
	var out []span
	for _, s := range all {
		if n := len(out); n > 0 && out[n-1].covers(s) {
			continue
		}
		out = append(out, s)
	}
	return out
}

// coverage answers which addresses are in a set of spans.
type coverage []span

// newCoverage joins adjacent ranges of a sorted, disjoint list.
func newCoverage(spans []span) coverage {
	var c coverage
	for _, s := range spans {
		if n := len(c); n > 0 && c[n-1].last.Next() == s.first {
			c[n-1].last = s.last
			continue
		}
		c = append(c, s)
	}
	return c
}

func (c coverage) covers(s span) bool {
	i, found := slices.BinarySearchFunc(c, s.first, func(t span, a netip.Addr) int { return t.first.Compare(a) })
	if !found {
		i--
	}
	return i >= 0 && c[i].covers(s)
}

// change is a step from one content of a set to another that must happen in one transaction: del
// gives way to add.
type change struct{ del, add []span }

// steps returns the transactions that lead from have to want, both disjoint: new ranges first, then
// ranges that must be swapped since they overlap, leftovers last.
func steps(have, want []span) []change {
	surplus := map[span]bool{}
	for _, s := range have {
		surplus[s] = true
	}
	var differ []span
	for _, s := range want {
		if surplus[s] {
			delete(surplus, s)
		} else {
			differ = append(differ, s)
		}
	}
	differ = slices.SortedFunc(slices.Values(slices.AppendSeq(differ, maps.Keys(surplus))), compareSpans)
	var add, del []span
	var swaps []change
	for len(differ) > 0 {
		// c becomes the first range and those that overlap it, or each other.
		var c change
		for reach := differ[0].last; len(differ) > 0 && differ[0].first.Compare(reach) <= 0; differ = differ[1:] {
			if reach.Less(differ[0].last) {
				reach = differ[0].last
			}
			if surplus[differ[0]] {
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

// elements encodes spans as the kernel wants them: the first address, and the one after the last
// marked as an end. A range up to the highest address has no end.
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

// spans decodes what [elements] encodes, in whatever order the kernel lists it, and returns it
// sorted. A beginning without an end reaches up to the next one, as in the kernel.
func spans(elems []nftables.SetElement) []span {
	elems = slices.Clone(elems)
	slices.SortFunc(elems, func(a, b nftables.SetElement) int {
		switch c := bytes.Compare(a.Key, b.Key); {
		case c != 0 || a.IntervalEnd == b.IntervalEnd:
			return c
		case a.IntervalEnd:
			return -1
		}
		return 1
	})
	var out []span
	open := false
	for _, e := range elems {
		at, _ := netip.AddrFromSlice(e.Key) // the kernel has no others in a set of addresses
		if open {
			out[len(out)-1].last = at.Prev()
		}
		if open = !e.IntervalEnd; open {
			out = append(out, span{first: at, last: highest(at)})
		}
	}
	return out
}

func highest(a netip.Addr) netip.Addr {
	return spanOf(netip.PrefixFrom(a, 0)).last
}
