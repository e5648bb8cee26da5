package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// texts returns the readable form of ranges.
func texts(ranges []nft.Range) string {
	list := []string{}
	for _, r := range ranges {
		text := r.First.String()
		if r.First != r.Last {
			text += "-" + r.Last.String()
		}
		list = append(list, text)
	}
	return fmt.Sprint(list)
}

func overlap(a, b nft.Range) bool {
	return a.First.Compare(b.Last) <= 0 && b.First.Compare(a.Last) <= 0
}

func TestElementsRoundTripInAnyOrder(t *testing.T) {
	for _, tt := range []struct {
		name  string
		vips  []string
		spans string
	}{
		{name: "none", spans: "[]"},
		{name: "host", vips: []string{"20.0.0.1/32"}, spans: "[20.0.0.1]"},
		{name: "neighbours stay apart", vips: []string{"20.0.0.2/32", "20.0.0.1/32"}, spans: "[20.0.0.1 20.0.0.2]"},
		{name: "host in prefix", vips: []string{"20.0.0.7/32", "20.0.0.0/24"}, spans: "[20.0.0.0-20.0.0.255]"},
		{
			name: "first and last of prefix", vips: []string{"20.0.0.0/32", "20.0.0.255/32", "20.0.0.0/24"},
			spans: "[20.0.0.0-20.0.0.255]",
		},
		{
			name: "nested three deep", vips: []string{"20.0.0.0/8", "20.1.0.0/16", "20.1.1.0/24"},
			spans: "[20.0.0.0-20.255.255.255]",
		},
		{
			name: "IPv6", vips: []string{"2000::1/128", "2000::2/128", "2000:0:0:1::/64"},
			spans: "[2000::1 2000::2 2000:0:0:1::-2000::1:ffff:ffff:ffff:ffff]",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			set := vip.NewSet(vips(tt.vips...)...)
			var f vip.Family
			for v := range set {
				f = v.Family()
			}
			want := disjoint(set, f)
			if got := texts(want); got != tt.spans {
				t.Errorf("got %s, want %s", got, tt.spans)
			}
			elems := elements(want)
			if got := nft.Ranges(elems); !slices.Equal(got, want) {
				t.Errorf("read back %v, want %v", got, want)
			}
			slices.Reverse(elems)
			if got := nft.Ranges(elems); !slices.Equal(got, want) {
				t.Errorf("read back backwards %v, want %v", got, want)
			}
		})
	}
}

func TestStepsKeepRemainingVIPs(t *testing.T) {
	// A small corner of the address space, so that prefixes nest and touch.
	prefix := rapid.Custom(func(t *rapid.T) vip.VIP {
		bits := rapid.SampledFrom([]int{24, 27, 28, 29, 30, 31, 32}).Draw(t, "bits")
		a := netip.AddrFrom4([4]byte{20, 0, 0, rapid.Byte().Draw(t, "host")})
		v, err := vip.FromPrefix(netip.PrefixFrom(a, bits).Masked())
		harness.Must(t, err)
		return v
	})
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) (vip.Set, []nft.Range) {
			s := vip.NewSet(rapid.SliceOfN(prefix, 0, 12).Draw(t, name)...)
			return s, disjoint(s, vip.IPv4)
		}
		haveVIPs, have := draw("have")
		wantVIPs, want := draw("want")
		in := slices.Clone(have)
		for _, c := range steps(have, want) {
			for _, d := range c.del {
				i := slices.Index(in, d)
				if i < 0 {
					t.Fatalf("%v is deleted, but only %v is there", d, in)
				}
				in = slices.Delete(in, i, i+1)
			}
			for _, a := range c.add {
				for _, s := range in {
					if overlap(s, a) {
						t.Fatalf("%v is added to %v", a, in)
					}
				}
				in = append(in, a)
			}
			slices.SortFunc(in, nft.Range.Compare)
			for v := range haveVIPs {
				if wantVIPs.Has(v) && !covered(in, nft.RangeOf(v.Prefix())) {
					t.Fatalf("%v stays, but was not covered by %v", v, in)
				}
			}
		}
		if !slices.Equal(in, want) {
			t.Fatalf("ended with %v, want %v", in, want)
		}
		for v := range wantVIPs {
			if !covered(in, nft.RangeOf(v.Prefix())) {
				t.Fatalf("%v is not covered by %v", v, in)
			}
		}
		for v := range haveVIPs {
			if want := slices.ContainsFunc(wantVIPs.Sorted(), func(w vip.VIP) bool { return w.Overlaps(v) }); !want &&
				covered(in, nft.RangeOf(v.Prefix())) {
				t.Fatalf("%v is still covered by %v", v, in)
			}
		}
	})
}

func TestCoveredByAdjacentSpans(t *testing.T) {
	half := func(p string) nft.Range { return nft.RangeOf(netip.MustParsePrefix(p)) }
	c := []nft.Range{half("20.0.0.0/25"), half("20.0.0.128/25"), half("20.0.2.0/24")}
	for p, want := range map[string]bool{
		"20.0.0.0/24": true, "20.0.0.127/32": true, "20.0.0.128/31": true, "20.0.0.0/23": false, "20.0.1.0/32": false,
		"19.0.0.0/32": false, "20.0.2.255/32": true, "20.0.3.0/32": false,
	} {
		if got := covered(c, half(p)); got != want {
			t.Errorf("covered(%s): %v", p, got)
		}
	}
}

func TestUnendedRangeReachesTheNextOne(t *testing.T) {
	highest := netip.MustParseAddr("255.255.255.255")
	got := nft.Ranges(append(elements([]nft.Range{{First: highest, Last: highest}}),
		elements([]nft.Range{{First: netip.MustParseAddr("20.0.0.1"), Last: highest}})...))
	if want := "[20.0.0.1-255.255.255.254 255.255.255.255]"; texts(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
}
