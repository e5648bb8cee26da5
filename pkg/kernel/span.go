package kernel

import (
	"cmp"
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

// covers reports whether every address of t is in s.
func (s span) covers(t span) bool {
	return s.first.Compare(t.first) <= 0 && t.last.Compare(s.last) <= 0
}

func (s span) overlaps(t span) bool {
	return s.first.Compare(t.last) <= 0 && t.first.Compare(s.last) <= 0
}

func (s span) String() string {
	if s.first == s.last {
		return s.first.String()
	}
	return s.first.String() + "-" + s.last.String()
}

func compareSpans(a, b span) int {
	// Of two that begin together the wider comes first.
	return cmp.Or(a.first.Compare(b.first), b.last.Compare(a.last))
}

// disjoint returns, in order, the ranges of the VIPs of one family without those that lie in
// another one: an interval set refuses overlaps. Prefixes either nest or are apart, so nothing has
// to be cut. Adjacent ranges stay separate, so that adding one VIP never rewrites another one's
// range.
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

// change is a step from one set content to another that must happen in one transaction: del gives
// way to add.
type change struct{ del, add []span }

// diff returns the steps from have to want, both sorted and disjoint: new ranges first, then ranges
// that must be swapped since they overlap, leftovers last.
func diff(have, want []span) (add []span, swaps []change, del []span) {
	surplus, missing := subtract(have, want), subtract(want, have)
	for len(surplus) > 0 || len(missing) > 0 {
		switch {
		case len(surplus) == 0:
			return append(add, missing...), swaps, del
		case len(missing) == 0:
			return add, swaps, append(del, surplus...)
		case surplus[0].overlaps(missing[0]):
			var c change
			reach := surplus[0].last
			for more := true; more; {
				more = false
				for len(surplus) > 0 && surplus[0].first.Compare(reach) <= 0 {
					reach, more = later(reach, surplus[0].last), true
					c.del, surplus = append(c.del, surplus[0]), surplus[1:]
				}
				for len(missing) > 0 && missing[0].first.Compare(reach) <= 0 {
					reach, more = later(reach, missing[0].last), true
					c.add, missing = append(c.add, missing[0]), missing[1:]
				}
			}
			swaps = append(swaps, c)
		case surplus[0].first.Less(missing[0].first):
			del, surplus = append(del, surplus[0]), surplus[1:]
		default:
			add, missing = append(add, missing[0]), missing[1:]
		}
	}
	return add, swaps, del
}

func later(a, b netip.Addr) netip.Addr {
	if a.Less(b) {
		return b
	}
	return a
}

// subtract returns the spans of a that are not in b; both are sorted.
func subtract(a, b []span) []span {
	var out []span
	for _, s := range a {
		for len(b) > 0 && compareSpans(b[0], s) < 0 {
			b = b[1:]
		}
		if len(b) == 0 || b[0] != s {
			out = append(out, s)
		}
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
	type bound struct {
		at  netip.Addr
		end bool
	}
	bounds := make([]bound, 0, len(elems))
	for _, e := range elems {
		if a, ok := netip.AddrFromSlice(e.Key); ok {
			bounds = append(bounds, bound{a, e.IntervalEnd})
		}
	}
	slices.SortFunc(bounds, func(a, b bound) int {
		if c := a.at.Compare(b.at); c != 0 || a.end == b.end {
			return c
		}
		if a.end {
			return -1
		}
		return 1
	})
	var out []span
	open := false
	for _, b := range bounds {
		if open {
			out[len(out)-1].last = b.at.Prev()
		}
		if open = !b.end; open {
			out = append(out, span{first: b.at, last: highest(b.at)})
		}
	}
	return out
}

func highest(a netip.Addr) netip.Addr {
	return spanOf(netip.PrefixFrom(a, 0)).last
}
