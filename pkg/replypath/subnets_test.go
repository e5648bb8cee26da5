package replypath

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// resolve asks for the target's address, as a host with an address does before its first packet.
func (w *wire) resolve(from net.HardwareAddr, address string, hopLimit byte) {
	w.Helper()
	own := netip.MustParseAddr(address)
	if own.Is4() {
		target := netip.MustParseAddr("172.16.0.100")
		w.send(w.target, from, unix.ETH_P_ARP, slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, from, own.AsSlice(),
			make([]byte, 6), target.AsSlice()))
		return
	}
	target := netip.MustParseAddr("fd00:2::100")
	solicit, err := (&icmp.Message{Type: ipv6.ICMPTypeNeighborSolicitation, Body: &icmp.RawBody{
		Data: slices.Concat(make([]byte, 4), target.AsSlice(), []byte{1, 1}, from),
	}}).Marshal(icmp.IPv6PseudoHeader(own.AsSlice(), target.AsSlice()))
	harness.Must(w, err)
	etherType, b := packet(own, target, unix.IPPROTO_ICMPV6, solicit)
	b[7] = hopLimit
	w.send(w.target, from, etherType, b)
}

// With subnets, only hosts that resolve the target from an address in them are learned, also
// without a process. Packets of other hosts are dropped.
func TestPeerSubnets(t *testing.T) {
	x, w := wireFixture(t)
	x.must(x.target.Batch("neigh add 172.16.9.9 lladdr 02:00:00:09:ff:ff dev " + link))
	o := x.options()
	p, stop := x.start(o)
	x.complete(p)
	const early, neighbor, outside = 1, 2, 11
	if !w.answers(mac(early)) || !w.answers(mac(neighbor)) {
		t.Error("without subnets: a host is not answered")
	}
	stop()
	x.must(x.target.Batch(fmt.Sprintf("neigh add 172.16.1.2 lladdr %s dev %s nud permanent", mac(neighbor), link)))

	o.PeerSubnets = pool("172.16.1.0/24", "fd00:2::1:0/112")
	p, stop = x.start(o)
	x.complete(p)
	await.True(t, "answer to a neighbor", func() bool { return w.answers(mac(neighbor)) })
	await.True(t, "peer of an earlier start", func() bool { return peer(p, mac(early).String()).MAC == "" })
	if n := x.peersInKernel(); n != 1 {
		t.Errorf("%d peers in the kernel, want the neighbor alone", n)
	}
	if w.answers(mac(early)) {
		t.Error("a peer of an earlier start is answered")
	}
	await.True(t, "counter of drops", func() bool { return p.Status().Dropped > 0 })

	for i, c := range []struct {
		name, address string
		hopLimit      byte
		want          bool
	}{
		{name: "IPv4", address: "172.16.1.1", want: true},
		{name: "IPv4 outside", address: "172.16.2.0"},
		{name: "IPv6", address: "fd00:2::1:1", hopLimit: 255, want: true},
		{name: "IPv6 outside", address: "fd00:2::2:0", hopLimit: 255},
		{name: "IPv6 of a router", address: "fd00:2::1:2", hopLimit: 254},
		{name: "IPv4 of a pod that moved", address: "172.16.1.1", want: true},
	} {
		from := mac(10 + i)
		if w.answers(from) {
			t.Errorf("%s: answer to an unknown host", c.name)
		}
		w.resolve(from, c.address, c.hopLimit)
		if got := w.answers(from); got != c.want {
			t.Errorf("%s: answer %v, want %v", c.name, got, c.want)
		}
		await.True(t, c.name+": status", func() bool { return peer(p, from.String()).Seen == c.want })
	}

	// A table that another process removed.
	x.sh(x.target, "nft delete table netdev vipgate-target")
	await.True(t, "answer to a neighbor after a repair", func() bool { return w.answers(mac(neighbor)) })
	if w.answers(mac(outside)) {
		t.Error("answer after a repair to a neighbor outside of the subnets")
	}
	stop()

	w.resolve(mac(30), "172.16.1.30", 0)
	if !w.answers(mac(30)) || w.answers(mac(31)) {
		t.Error("without a process: not only the trench pod is answered")
	}
	// Packets to the pool keep the address.
	element := fmt.Sprintf("element netdev vipgate-target pods { %s ", mac(30))
	x.sh(x.target, fmt.Sprintf("nft 'delete %s}'; nft 'add %stimeout 1h }'", element, element))
	if !w.answers(mac(30)) || strings.Contains(x.sh(x.target, "nft 'get "+element+"}'"), "expires 59m") {
		t.Error("a packet does not extend the lifetime")
	}
	// Forged ARP fills the set, until a process removes those without a neighbor entry.
	for i := range maxPeers {
		w.resolve(mac(1000+i), "172.16.1.3", 0)
	}
	w.resolve(mac(31), "172.16.1.31", 0)
	if w.answers(mac(31)) {
		t.Error("the set has room without a process")
	}
	p, stop = x.start(o)
	await.True(t, "answer to a new trench pod", func() bool { return w.answers(mac(31)) })
	stop()

	p, _ = x.start(x.options())
	x.complete(p)
	await.True(t, "answer without subnets", func() bool { return w.answers(mac(32)) })
}

// An IPv6 trench pod is known from the resolution for its own check, although it resolves the
// target for packets of clients from its link-local address.
func TestPeerSubnetIPv6(t *testing.T) {
	x := newFixture(t, 1)
	o := x.options()
	o.PeerSubnets = pool("fd00:2::/124")
	p, _ := x.start(o)
	x.serve("80")
	x.complete(p)
	x.openFrom(x.pods[0], "tcp", "", net.JoinHostPort(vips[1], "80")).mustEcho(1)
	for _, v := range vips {
		x.open("tcp", net.JoinHostPort(v, "80")).mustEcho(100)
	}
}
