package path

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
)

func addr(prefix string, flags ...string) rtnetlink.Address {
	p := netip.MustParsePrefix(prefix)
	a := rtnetlink.Address{Addr: p.Addr(), Network: p.Masked()}
	for _, f := range flags {
		switch f {
		case "second":
			a.Flags |= unix.IFA_F_SECONDARY
		case "tentative":
			a.Flags |= unix.IFA_F_TENTATIVE
		case "duplicate":
			a.Flags |= unix.IFA_F_DADFAILED
		default:
			a.Network = netip.MustParsePrefix(f)
		}
	}
	return a
}

func TestSelectLocal(t *testing.T) {
	for _, tt := range []struct {
		name, gateway, current string
		addrs                  []rtnetlink.Address
		want, problem          string
	}{
		{
			name: "the one in its network", gateway: "10.0.1.9",
			addrs: []rtnetlink.Address{addr("10.0.0.1/24"), addr("10.0.1.1/24")}, want: "10.0.1.1",
		},
		{
			name: "the narrowest network", gateway: "10.0.1.9",
			addrs: []rtnetlink.Address{addr("10.0.0.1/8"), addr("10.0.1.1/24"), addr("10.0.3.1/16")}, want: "10.0.1.1",
		},
		{
			name: "not a secondary one", gateway: "10.0.1.9",
			addrs: []rtnetlink.Address{addr("10.0.1.2/25", "second"), addr("10.0.1.1/24")}, want: "10.0.1.1",
		},
		{
			name: "only a secondary address", gateway: "10.0.1.9",
			addrs: []rtnetlink.Address{addr("10.0.1.2/24", "second")}, want: "10.0.1.2",
		},
		{
			name: "a point-to-point address", gateway: "10.9.9.9",
			addrs: []rtnetlink.Address{addr("10.0.0.1/32", "10.9.9.9/32")}, want: "10.0.0.1",
		},
		{
			name: "a link-local gateway", gateway: "fe80::9", addrs: []rtnetlink.Address{addr("fe80::1/64"), addr("fd00::1/64")},
			want: "fe80::1",
		},
		{
			name: "another network", gateway: "10.0.1.9", addrs: []rtnetlink.Address{addr("10.0.0.1/24")},
			problem: "gateway 10.0.1.9 is in the network of none of its addresses (10.0.0.1/24); ",
		},
		{
			name: "another network of the range of link-local addresses", gateway: "10.0.1.9",
			addrs:   []rtnetlink.Address{addr("169.254.100.1/24"), addr("fd00::1/64")},
			problem: "gateway 10.0.1.9 is in the network of none of its addresses (169.254.100.1/24); ",
		},
		{
			name: "many other networks", gateway: "10.0.1.9",
			addrs: []rtnetlink.Address{
				addr("10.1.0.1/24"), addr("10.2.0.1/24"), addr("10.3.0.1/24"), addr("10.4.0.1/24"),
				addr("10.5.0.1/24"), addr("10.6.0.1/24"), addr("10.7.0.1/24"),
			},
			problem: "(10.1.0.1/24, 10.2.0.1/24, 10.3.0.1/24, 10.4.0.1/24, 10.5.0.1/24, 2 more); ",
		},
		{
			name: "another family", gateway: "fd00::9", addrs: []rtnetlink.Address{addr("10.0.0.1/24"), addr("fe80::1/64")},
			problem: "no ipv6 address",
		},
		{name: "no address", gateway: "10.0.1.9", problem: "no ipv4 address"},
		{
			name: "itself", gateway: "10.0.1.1", addrs: []rtnetlink.Address{addr("10.0.1.2/24"), addr("10.0.1.1/24")},
			problem: "is a local address",
		},
		{
			name: "none during duplicate address detection", gateway: "fd00::9",
			addrs: []rtnetlink.Address{addr("fd00::1/64", "tentative")}, problem: "fd00::1 is tentative",
		},
		{
			name: "other than the tentative address", gateway: "fd00::9",
			addrs: []rtnetlink.Address{addr("fd00::1/64", "tentative"), addr("fd00::2/64")}, want: "fd00::2",
		},
		{
			name: "a duplicate address", gateway: "fd00::9",
			addrs: []rtnetlink.Address{addr("fd00::1/64", "tentative",
				"duplicate")}, problem: "duplicate address detection failed",
		},
		{
			name: "current address, better one exists", gateway: "fd00::9", current: "fd00::1",
			addrs: []rtnetlink.Address{addr("fd00::2/64"), addr("fd00::1/64", "second")}, want: "fd00::1",
		},
		{
			name: "current address, tentative again", gateway: "fd00::9", current: "fd00::1",
			addrs: []rtnetlink.Address{addr("fd00::1/64", "tentative")}, want: "fd00::1",
		},
		{
			name: "the current address is a duplicate", gateway: "fd00::9", current: "fd00::1",
			addrs: []rtnetlink.Address{addr("fd00::1/64", "duplicate")}, problem: "duplicate address detection failed",
		},
		{
			name: "other address, current one removed", gateway: "fd00::9", current: "fd00::1",
			addrs: []rtnetlink.Address{addr("fd00::2/64")}, want: "fd00::2",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var current netip.Addr
			if tt.current != "" {
				current = netip.MustParseAddr(tt.current)
			}
			got, problem := SelectLocal(netip.MustParseAddr(tt.gateway), current, tt.addrs)
			if tt.problem != "" {
				if got.IsValid() || !strings.Contains(strings.ToLower(problem), tt.problem) {
					t.Errorf("%v, %q; want a problem with %q", got, problem, tt.problem)
				}
				return
			}
			if problem != "" || got != netip.MustParseAddr(tt.want) {
				t.Errorf("%v, %q; want %s", got, problem, tt.want)
			}
		})
	}
}
