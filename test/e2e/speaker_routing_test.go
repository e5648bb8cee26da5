package e2e

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// With --source-routing=on the frontend has rules, marks and blackholes, and another program keeps
// the routes of the table.
func TestForeignSourceRouting(t *testing.T) {
	t.Parallel()
	f := newForeign(t)
	f.caps = "-all,+net_admin"
	// The IPv4 VIP belongs to a server on this host, the IPv6 one to targets. The main table sends
	// replies to the targets.
	const client = "192.0.2.9"
	harness.Must(t, f.Pod.Batch("addr add "+vipA4+" dev lo", "route add default via "+lab.Target1v4.String()))
	harness.Must(t, f.Gateway.Batch("addr add "+client+"/32 dev lo",
		"route add "+vipA4+" via "+lab.PodExternal4.String()+" src "+client))
	server := lab.NewTarget(f.Pod, netip.AddrPortFrom(netip.MustParsePrefix(vipA4).Addr(), checkPort))
	harness.Must(t, server.Up())
	t.Cleanup(func() { harness.Check(t, server.Down()) })
	connect := func(timeout time.Duration) error {
		return f.Gateway.Do(func() error {
			conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(netip.MustParsePrefix(vipA4).Addr(), checkPort).String(),
				timeout)
			if err == nil {
				conn.Close()
			}
			return err
		})
	}

	f.ready(true)
	f.frontend(announcerFirst, "--source-routing=on", "--external-interface="+lab.External)
	f.waitCount(2)
	f.waitStatus("2 of 2 VIPs advertised")
	if err := connect(500 * time.Millisecond); err == nil {
		t.Error("replies leave by the main table, before the table has a route")
	}
	mark := f.receiver.Mark()
	for _, gateway := range []netip.Addr{lab.GatewayA4, lab.GatewayA6} {
		harness.Must(t, f.Pod.IP("route", "add", "default", "via", gateway.String(), "table", "4096"))
	}
	harness.Must(t, connect(5*time.Second))
	// A rule that precedes ours diverts the packets from targets. The lookups that find it look up the
	// routes of both families, too: one that was refused would withdraw its VIP.
	harness.Must(t, f.Pod.IP("-6", "rule", "add", "priority", "95", "iif", lab.Internal, "blackhole"))
	f.waitCount(1)
	withdrawn := slices.DeleteFunc(f.receiver.Since(mark), func(u lab.PrefixUpdate) bool { return !u.Withdrawn })
	if len(withdrawn) != 1 || !withdrawn[0].Prefix.Addr().Is6() {
		t.Errorf("the routes of another program withdraw VIPs: %v\n%s", withdrawn, f.status(announcerFirst))
	}
	harness.Must(t, f.Pod.IP("-6", "rule", "del", "priority", "95"))
	f.waitCount(2)
}
