package rtnetlink

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// Local routes, and routes with a next hop outside the interface's connected networks, are listed
// as written.
func TestLocalAndOnLinkRoutes(t *testing.T) {
	ns, c := connect(t)
	for f, x := range map[vip.Family]struct{ prefix, hop string }{
		vip.IPv4: {"20.0.0.0/24", "192.0.2.1"}, vip.IPv6: {"2000::/64", "fe80::7667:1"},
	} {
		links, err := c.Links()
		must(t, err)
		ext := links[slices.IndexFunc(links, func(l Link) bool { return l.Name == "ext" })].Index
		local := Route{
			Family: f, Table: unix.RT_TABLE_LOCAL, Prefix: netip.MustParsePrefix(x.prefix), Type: unix.RTN_LOCAL, Protocol: 118,
			Metric: 5, Link: 1,
		}
		out := Route{
			Family: f, Table: 77, Prefix: DefaultPrefix(f), Type: unix.RTN_UNICAST, Protocol: 118, Metric: 5, Link: ext,
			NextHop: netip.MustParseAddr(x.hop), OnLink: true,
		}
		for range 2 {
			must(t, c.Apply(local.Replace()))
			must(t, c.Apply(out.Replace()))
		}
		got, err := c.Routes(f, RouteFilter{Protocol: 118})
		if err != nil || len(got) != 2 || !slices.Contains(got, local) || !slices.Contains(got, out) {
			t.Errorf("got %+v, %v\n%s", got, err, ns.Shell(t, "ip route show table all; ip -6 route show table all"))
		}
		other := out
		other.Link = 1
		must(t, c.Apply(other.Delete())) // a route of a different interface does not exist
		must(t, c.Apply(local.Delete()))
		if got, err := c.Routes(f, RouteFilter{Protocol: 118}); err != nil || len(got) != 1 || got[0] != out {
			t.Errorf("got %+v, %v", got, err)
		}
	}
}

func TestPermanentAndVerifiedNeighbors(t *testing.T) {
	ns, c := connect(t)
	links, err := c.Links()
	must(t, err)
	ext := links[slices.IndexFunc(links, func(l Link) bool { return l.Name == "ext" })].Index
	ns.Shell(t, "sysctl -qw net.ipv4.neigh.ext.ucast_solicit=1 net.ipv6.neigh.ext.ucast_solicit=1 "+
		"net.ipv4.neigh.ext.retrans_time_ms=50 net.ipv6.neigh.ext.retrans_time_ms=50")
	for f, a := range map[vip.Family]string{vip.IPv4: "169.254.100.77", vip.IPv6: "fe80::77"} {
		n := Neighbor{Link: ext, Addr: netip.MustParseAddr(a), MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}}
		state := func() (Neighbor, bool) {
			list, err := c.Neighbors(f)
			must(t, err)
			i := slices.IndexFunc(list, func(m Neighbor) bool { return m.Addr == n.Addr })
			if i < 0 {
				return Neighbor{}, false
			}
			return list[i], true
		}
		must(t, c.Apply(n.Permanent()))
		must(t, c.Apply(n.Permanent()))
		if got, _ := state(); got.State != unix.NUD_PERMANENT || !slices.Equal(got.MAC, n.MAC) {
			t.Errorf("got %+v", got)
		}
		must(t, c.Apply(n.Verify()))
		await.True(t, "failed neighbor", func() bool {
			got, ok := state()
			return !ok || got.State == unix.NUD_FAILED
		})
		must(t, c.Apply(n.Delete()))
		must(t, c.Apply(n.Delete()))
		if got, ok := state(); ok {
			t.Errorf("got %+v after its deletion", got)
		}
	}
}
