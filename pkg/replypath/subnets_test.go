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

// advertise answers the target's request for an address.
func (w *wire) advertise(from net.HardwareAddr, address string) {
	w.Helper()
	own := netip.MustParseAddr(address)
	if own.Is4() {
		w.send(w.target, from, unix.ETH_P_ARP, slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 2}, from, own.AsSlice(),
			w.target, []byte{172, 16, 0, 100}))
		return
	}
	target := netip.MustParseAddr("fd00:2::100")
	advertisement, err := (&icmp.Message{Type: ipv6.ICMPTypeNeighborAdvertisement, Body: &icmp.RawBody{
		Data: slices.Concat([]byte{0x60, 0, 0, 0}, own.AsSlice(), []byte{2, 1}, from), // solicited, override
	}}).Marshal(icmp.IPv6PseudoHeader(own.AsSlice(), target.AsSlice()))
	harness.Must(w, err)
	etherType, b := packet(own, target, unix.IPPROTO_ICMPV6, advertisement)
	b[7] = 255 // hop limit, RFC 4861
	w.send(w.target, from, etherType, b)
}

// With subnets, only hosts that answer for an address in them are peers. Packets of other hosts to
// the pool are dropped, also of peers of a start without subnets.
func TestPeerSubnets(t *testing.T) {
	x, w := wireFixture(t)
	x.must(x.target.Batch("neigh add 172.16.9.9 lladdr 02:00:00:09:ff:ff dev " + link))
	const stranger, idle = 1, 2
	o := x.options()
	p, stop := x.start(o)
	x.complete(p)
	if !w.answers(mac(stranger)) {
		t.Error("without subnets: a host is not answered")
	}
	stop()

	// Neighbors outside of the subnets, as after a request of the target.
	x.must(x.target.Batch(fmt.Sprintf("neigh add 172.16.1.2 lladdr %s dev %s", mac(11), link),
		fmt.Sprintf("neigh add fd00:2::1:2 lladdr %s dev %s", mac(13), link)))
	o.PeerSubnets = pool("172.16.1.0/31", "fd00:2::1:0/127")
	p, stop = x.start(o)
	x.complete(p)
	await.True(t, "peer of an earlier start", func() bool { return peer(p, mac(stranger).String()).MAC == "" })
	if w.answers(mac(stranger)) {
		t.Error("a peer of an earlier start is answered")
	}
	for i, c := range []struct {
		name, address string
		want          bool
	}{
		{"IPv4", "172.16.1.1", true},
		{"IPv4 outside", "172.16.1.2", false},
		{"IPv6", "fd00:2::1:1", true},
		{"IPv6 outside", "fd00:2::1:2", false},
		{"another pod with the address", "172.16.1.1", true},
	} {
		from := mac(10 + i)
		if w.answers(from) {
			t.Errorf("%s: answer to an unknown host", c.name)
		}
		await.True(t, c.name, func() bool {
			w.advertise(from, c.address)
			return (peer(p, from.String()).MAC != "") == c.want
		})
		if got := w.answers(from); got != c.want {
			t.Errorf("%s: answer %v, want %v", c.name, got, c.want)
		}
	}
	if s := p.Status(); s.Dropped > 0 {
		t.Errorf("%d packets of unknown hosts are counted as replies", s.Dropped)
	}
	stop()
	if !w.answers(mac(14)) || w.answers(mac(idle)) {
		t.Error("without a process: not only the trench pods are answered")
	}

	p, _ = x.start(x.options())
	x.complete(p)
	if !w.answers(mac(idle)) {
		t.Error("without subnets: a host is not answered")
	}
}

// A trench pod is known before its first packet, and by an address of either family, although it
// resolves the target for its checks from an address of another interface. A second one, outside of
// the subnets, gets no answer.
func TestPeerSubnetsOfChecks(t *testing.T) {
	for _, subnet := range []string{"172.16.0.1/32", "fd00:2::1/128"} {
		t.Run(subnet, func(t *testing.T) {
			x := newFixture(t, 2)
			o := x.options()
			o.PeerSubnets = pool(subnet)
			p, _ := x.start(o)
			x.serve("80")
			x.complete(p)
			await.True(t, "trench pod without packets", func() bool {
				known := peer(p, podMAC(2, 0))
				return known.Live && !known.Seen
			})
			x.sh(x.pods[0], `ip route replace 20.0.0.0/8 via 172.16.0.100 src 192.168.0.1
ip -6 route replace 2000::/16 via fd00:2::100 src fd00:1::1`)
			var flows []*flow
			for i, v := range vips {
				check := x.openFrom(x.pods[0], "tcp", "", net.JoinHostPort(v, "80"))
				if host, _, _ := net.SplitHostPort(check.LocalAddr().String()); host != []string{"192.168.0.1", "fd00:1::1"}[i] {
					t.Errorf("the check leaves from %s", host)
				}
				flows = append(flows, check, x.open("tcp", net.JoinHostPort(v, "80")))
			}
			x.via(1)
			outside := x.open("udp", "20.0.0.1:80")
			dropped := func() bool {
				_, err := outside.Write([]byte("x"))
				x.must(err)
				rules := x.sh(x.target, "nft list chain netdev vipgate-target ingress")
				return strings.Contains(rules, "drop") && strings.Count(rules, "packets 0 ") < 2
			}
			await.True(t, "dropped packet", dropped)
			x.via(0)
			for range 3 {
				for _, f := range flows {
					f.mustEcho(100)
				}
				repairs := p.Status().Repairs
				x.sh(x.target, "nft delete table netdev vipgate-target")
				await.True(t, "repair", func() bool { s := p.Status(); return s.Repairs > repairs && s.Complete })
			}
			x.via(1)
			await.True(t, "dropped packet after a repair", dropped)
			if known := peer(p, podMAC(2, 1)); known.MAC != "" {
				t.Errorf("a host outside of the subnets is a peer: %+v", known)
			}
		})
	}
}
