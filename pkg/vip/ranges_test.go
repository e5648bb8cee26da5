package vip

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRanges(t *testing.T) {
	for _, tt := range []struct{ prefixes, want []string }{
		{nil, nil},
		{[]string{"20.0.0.1/32"}, []string{"20.0.0.1/32 0"}},
		{[]string{"20.0.0.2/32", "20.0.0.1/32", "20.0.0.2/32"}, []string{"20.0.0.1/32 0", "20.0.0.2/32 0"}},
		{[]string{"20.0.0.3/32", "20.0.0.1/32", "20.0.0.2/32"}, []string{"20.0.0.1/32 0", "20.0.0.2/31 32"}},
		{[]string{"20.0.0.0/31", "20.0.0.2/31", "20.0.0.4/32"}, []string{"20.0.0.0/31 0", "20.0.0.2/31 0", "20.0.0.4/32 0"}},
		{[]string{"20.0.0.0/31", "20.0.0.2/32", "20.0.0.3/32"}, []string{"20.0.0.0/31 0", "20.0.0.2/31 32"}},
		{[]string{"2000::/128", "2000::1/128", "2000::2/128", "2000::3/128"}, []string{"2000::/126 128"}},
	} {
		var prefixes []netip.Prefix
		for _, text := range tt.prefixes {
			prefixes = append(prefixes, netip.MustParsePrefix(text))
		}
		var got []string
		for _, entry := range Ranges(prefixes) {
			got = append(got, fmt.Sprint(entry.Prefix, " ", entry.Length))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%v: %s", tt.prefixes, diff)
		}
	}
}

// The ranges of random addresses contain each of them once, and no other.
func TestRangesAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		var addresses []netip.Prefix
		for last := range 256 {
			if random.IntN(4) > 0 {
				addresses = append(addresses, netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, 0, byte(last)}), 32))
			}
		}
		var got []netip.Prefix
		for _, entry := range Ranges(addresses) {
			for address := entry.Addr(); entry.Contains(address); address = address.Next() {
				got = append(got, netip.PrefixFrom(address, 32))
			}
		}
		if !slices.Equal(got, addresses) {
			t.Fatalf("%v became %v", addresses, got)
		}
	}
}
