package vip

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		in      string
		want    string
		problem string
	}{
		{in: "20.0.0.1/32", want: "20.0.0.1/32"},
		{in: "2000::1/128", want: "2000::1/128"},
		{in: "2000:0::0001/128", want: "2000::1/128"},
		{in: "20.0.0.0/24", want: "20.0.0.0/24"},
		{in: "20.0.0.1", problem: "use 20.0.0.1/32"},
		{in: "2000::1", problem: "use 2000::1/128"},
		{in: "20.0.0.1/24", problem: "use 20.0.0.0/24, or 20.0.0.1/32"},
		{in: "0.0.0.0/0", problem: "default route"},
		{in: "::/0", problem: "default route"},
		{in: "127.0.0.1/32", problem: "loopback"},
		{in: "224.0.0.1/32", problem: "multicast"},
		{in: "fe80::1/128", problem: "link-local"},
		{in: "::ffff:1.2.3.4/128", problem: "use IPv4 notation"},
		{in: "::ffff:1.2.3.4", problem: "use 1.2.3.4/32"},
		{in: "fe80::1%eth0/128", problem: "not a prefix"},
		{in: "", problem: "not a prefix"},
		{in: "20.0.0.1/33", problem: "not a prefix"},
	} {
		t.Run(tt.in, func(t *testing.T) {
			v, err := Parse(tt.in)
			if tt.problem != "" {
				if err == nil || !strings.Contains(err.Error(), tt.problem) {
					t.Fatalf("Parse(%q) = %v, %v; want an error with %q", tt.in, v, err, tt.problem)
				}
				return
			}
			if err != nil || v.String() != tt.want {
				t.Fatalf("Parse(%q) = %v, %v; want %s", tt.in, v, err, tt.want)
			}
		})
	}
}

func TestSetSorted(t *testing.T) {
	s := NewSet(Require("2000::1/128"), Require("20.0.0.10/32"), Require("20.0.0.9/32"), Require("20.0.0.0/24"))
	var got []string
	for _, v := range s.Sorted() {
		got = append(got, v.String())
	}
	want := []string{"20.0.0.0/24", "20.0.0.9/32", "20.0.0.10/32", "2000::1/128"}
	if !slices.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// TestOrdinaryPrefixesAreNotSpecial checks every first byte and prefix length.
func TestOrdinaryPrefixesAreNotSpecial(t *testing.T) {
	for first := range 256 {
		for _, a := range []netip.Addr{
			netip.AddrFrom4([4]byte{byte(first)}), netip.AddrFrom16([16]byte{byte(first)}),
		} {
			for bits := range a.BitLen() + 1 {
				p := netip.PrefixFrom(a, bits).Masked()
				special := false
				for _, s := range specialPrefixes {
					special = special || s.prefix.Overlaps(p)
				}
				if special && isOrdinary(p) {
					t.Fatalf("%s is special", p)
				}
				if !special && bits >= 8 && first > 0 && first < 0xfe && !isOrdinary(p) {
					t.Fatalf("%s is not special", p)
				}
			}
		}
	}
}

// Only a subnet of special addresses alone permits one of them.
func TestNotTarget(t *testing.T) {
	for _, c := range []struct {
		address, subnets string
		refused          bool
	}{
		{"169.254.0.0", "", true},
		{"169.254.255.255", "0.0.0.0/0", true},
		{"169.254.1.1", "169.254.0.0/15", true},
		{"169.254.1.1", "10.0.0.0/8 169.254.0.0/16", false},
		{"169.254.1.1", "169.254.1.0/24", false},
		{"169.254.2.1", "169.254.1.0/24", true},
		{"169.253.255.255", "", false},
		{"169.255.0.0", "", false},
		{"127.0.0.1", "", true},
		{"127.0.0.1", "127.0.0.1/32", false},
		{"::1", "::/0", true},
		{"::2", "", false},
		{"fd00:ec2::254", "fd00::/8", true},
		{"fd00:ec2::253", "", false},
		{"100.100.100.200", "100.64.0.0/10", true},
		{"100.100.100.201", "", false},
		{"168.63.129.16", "168.63.0.0/16", true},
		{"168.63.129.17", "", false},
		{"fd20:ce::254", "fd00::/8", true},
		{"fd20:ce::253", "", false},
	} {
		var subnets []netip.Prefix
		for _, text := range strings.Fields(c.subnets) {
			subnets = append(subnets, netip.MustParsePrefix(text))
		}
		if what := NotTarget(netip.MustParseAddr(c.address), subnets); (what != "") != c.refused {
			t.Errorf("%+v: %q", c, what)
		}
	}
}
