package replypath

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
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

// inMap reports whether a host is in the peers map.
func (x *fixture) inMap(host net.HardwareAddr) bool {
	x.Helper()
	return strings.Contains(x.sh(x.target, "nft list map netdev vipgate-target peers"), host.String())
}

// With subnets, only hosts that answer for an address in them are peers. Packets of other hosts to
// the pool are dropped, also of hosts that a start without subnets or another process added.
func TestPeerSubnets(t *testing.T) {
	x, w := wireFixture(t)
	x.must(x.target.Batch("neigh add 172.16.9.9 lladdr 02:00:00:09:ff:ff dev " + link))
	stranger, idle, heir := mac(1), mac(2), mac(3)
	o := x.options()
	p, stop := x.start(o)
	x.complete(p)
	if !w.answers(stranger) {
		t.Error("without subnets: a host is not answered")
	}
	stop()

	hosts := []struct {
		address string
		inside  bool
	}{
		{"172.16.0.255", false},
		{"172.16.1.0", true},
		{"172.16.1.1", true},
		{"172.16.1.2", false},
		{"fd00:2::ffff", false},
		{"fd00:2::1:0", true},
		{"fd00:2::1:1", true},
		{"fd00:2::1:2", false},
	}
	for i, host := range hosts {
		if !host.inside { // a neighbor, as after a request of the target
			x.must(x.target.Batch(fmt.Sprintf("neigh add %s lladdr %s dev %s", host.address, mac(10+i), link)))
		}
	}
	o.PeerSubnets = pool("172.16.1.0/31", "fd00:2::1:0/127")
	p, stop = x.start(o)
	x.complete(p)
	await.True(t, "peer of an earlier start", func() bool { return !x.inMap(stranger) })
	for i, host := range hosts {
		if w.answers(mac(10 + i)) {
			t.Errorf("%s: answer before it is known", host.address)
		}
		await.True(t, host.address, func() bool {
			w.advertise(mac(10+i), host.address)
			return !host.inside || x.inMap(mac(10+i))
		})
	}
	for i, host := range hosts {
		if got := w.answers(mac(10 + i)); got != host.inside {
			t.Errorf("%s: answer %v, want %v", host.address, got, host.inside)
		}
	}

	for range 2 { // also while the process runs
		x.sh(x.target, fmt.Sprintf("nft add element netdev vipgate-target peers '{ %d : %s }'", fwmark(stranger), stranger))
		await.True(t, "peer that another process added", func() bool { return !x.inMap(stranger) })
		if w.answers(stranger) {
			t.Error("a stranger is answered")
		}
	}
	await.True(t, "another host with the address", func() bool {
		w.advertise(heir, "172.16.1.1")
		return x.inMap(heir) && !x.inMap(mac(12))
	})
	if !w.answers(heir) || w.answers(mac(12)) {
		t.Error("another host has the address: not it alone is answered")
	}
	if s := p.Status(); s.Dropped > 0 {
		t.Errorf("%d packets of unknown hosts are counted as replies", s.Dropped)
	}
	stop()
	if !w.answers(heir) || w.answers(idle) {
		t.Error("without a process: not only the trench pods are answered")
	}

	p, _ = x.start(x.options())
	x.complete(p)
	if !w.answers(idle) {
		t.Error("without subnets: a host is not answered")
	}
}

// Peers of an earlier start have three seconds to answer, by the calls of probe. The last host of
// an address stays a peer while its neighbor entry is missing.
func TestStrangers(t *testing.T) {
	pod, stranger := netip.MustParseAddr("172.16.0.1"), fwmark(mac(2))
	p := &peers{restricted: true, learned: map[uint32]learned{}}
	for i := range 4 {
		p.learned[fwmark(mac(i))] = learned{mac: mac(i), left: peerTimeout}
	}
	p.learned[fwmark(mac(3))] = learned{mac: mac(3), left: expiring}
	p.update([]rtnetlink.Neighbor{
		{Addr: pod, MAC: mac(0), State: unix.NUD_STALE}, {Addr: pod.Next(), MAC: mac(1), State: unix.NUD_STALE},
	})
	for p.ticks = range 6 {
		var want []uint32
		if p.ticks > 3 {
			want = []uint32{stranger}
		}
		if got := p.gone(time.Now()); !slices.Equal(got, want) {
			t.Errorf("after %d calls: %v, want %v", p.ticks, got, want)
		}
	}
	p.update([]rtnetlink.Neighbor{{Addr: pod, State: unix.NUD_FAILED}})
	if got := p.gone(time.Now()); !slices.Equal(got, []uint32{stranger}) {
		t.Errorf("without neighbor entries: %v, want %v", got, stranger)
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
