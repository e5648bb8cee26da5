package replypath

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// wire is the other end of the target's link: it sends and receives frames.
type wire struct {
	testing.TB
	fd     int
	target net.HardwareAddr
}

func newWire(t testing.TB, ns *lab.NetNS, dev string, target net.HardwareAddr) *wire {
	w := &wire{TB: t, target: target}
	err := ns.Do(func() (err error) {
		i, err := net.InterfaceByName(dev)
		if err != nil {
			return err
		}
		all := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all)); err != nil {
			return err
		}
		t.Cleanup(func() { _ = unix.Close(w.fd) })
		limit := unix.NsecToTimeval(int64(2 * time.Second))
		if err := unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
			return err
		}
		return unix.Bind(w.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index})
	})
	harness.Must(t, err)
	return w
}

// send sends a frame from a link-layer address.
func (w *wire) send(to, from net.HardwareAddr, etherType uint16, payload []byte) {
	frame := binary.BigEndian.AppendUint16(slices.Concat(to, from), etherType)
	if _, err := unix.Write(w.fd, append(frame, payload...)); err != nil {
		w.Fatal(err)
	}
}

// frame is a frame that the target sent.
type frame struct {
	to        net.HardwareAddr
	etherType uint16
	payload   []byte
}

// receive returns the next frame of the target; false after a timeout.
func (w *wire) receive() (frame, bool) {
	for b := make([]byte, 65536); ; {
		n, from, err := unix.Recvfrom(w.fd, b, 0)
		if err != nil {
			return frame{}, false
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING && n > 14 {
			return frame{slices.Clone(b[:6]), binary.BigEndian.Uint16(b[12:]), slices.Clone(b[14:n])}, true
		}
	}
}

// packet returns an IP packet with its Ethernet type.
func packet(from, to netip.Addr, protocol byte, payload []byte) (uint16, []byte) {
	if to.Is6() {
		b := binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(payload)))
		return unix.ETH_P_IPV6, slices.Concat(b, []byte{protocol, 64}, from.AsSlice(), to.AsSlice(), payload)
	}
	b := binary.BigEndian.AppendUint16([]byte{0x45, 0}, uint16(20+len(payload)))
	b = slices.Concat(b, []byte{0, 0, 0x40, 0, 64, protocol, 0, 0}, from.AsSlice(), to.AsSlice())
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	return unix.ETH_P_IP, append(b, payload...)
}

// echoRequest returns an ICMP echo request.
func echoRequest(from, to netip.Addr) (uint16, []byte) {
	body := &icmp.Echo{ID: 7, Seq: 1, Data: []byte("vipgate")}
	m, protocol, pseudo := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: body}, byte(unix.IPPROTO_ICMP), []byte(nil)
	if to.Is6() {
		m.Type, protocol = ipv6.ICMPTypeEchoRequest, unix.IPPROTO_ICMPV6
		pseudo = icmp.IPv6PseudoHeader(from.AsSlice(), to.AsSlice())
	}
	b, err := m.Marshal(pseudo)
	if err != nil {
		panic(err)
	}
	return packet(from, to, protocol, b)
}

// sctp returns an SCTP packet with one chunk (RFC 9260).
func sctp(sourcePort, port uint16, tag uint32, chunk byte) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, sourcePort), port)
	b = append(binary.BigEndian.AppendUint32(b, tag), 0, 0, 0, 0)
	b = append(b, chunk, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func mac(i int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 9, byte(i >> 8), byte(i)} }

// Each of 200 peers receives its replies, also with strict reverse path filtering, and for a
// protocol that the kernel does not support.
func TestManyPeers(t *testing.T) {
	x, w := wireFixture(t)
	x.must(x.target.Sysctl("net.ipv4.conf.all.rp_filter", "1"))
	x.must(x.target.Sysctl("net.ipv4.icmp_ratelimit", "0"))
	p, stop := x.start(x.options())
	x.complete(p)
	const peers = 200
	for i := range peers {
		vip, client := netip.MustParseAddr(vips[0]), netip.MustParseAddr(fmt.Sprintf("10.9.%d.1", i))
		if i%2 == 1 {
			vip, client = netip.MustParseAddr(vips[1]), netip.MustParseAddr(fmt.Sprintf("fd09:%x::1", i))
		}
		etherType, b := echoRequest(client, vip)
		w.send(w.target, mac(i), etherType, b)
		for {
			f, ok := w.receive()
			if !ok {
				t.Fatalf("peer %d: no reply from %s", i, vip)
			}
			if f.etherType == etherType && strings.Contains(string(f.payload), "vipgate") {
				if !slices.Equal(f.to, mac(i)) {
					t.Errorf("reply to %s for peer %s", f.to, mac(i))
				}
				break
			}
		}
	}
	await.True(t, "200 peers", func() bool { return len(p.Status().Peers) == peers })
	for _, y := range p.Status().Peers {
		if hw, _ := net.ParseMAC(y.MAC); !y.Seen || y.FWMark != fwmark(hw) {
			t.Errorf("peer %+v, fwmark of its link address %d", y, fwmark(hw))
		}
	}

	// SCTP: INIT, and INIT ACK by a raw socket.
	client, vip := netip.MustParseAddr("10.9.3.1"), netip.MustParseAddr(vips[0])
	var c net.PacketConn
	x.must(x.target.Do(func() (err error) {
		c, err = net.ListenPacket("ip4:132", vips[0])
		return err
	}))
	defer c.Close()
	etherType, b := packet(client, vip, unix.IPPROTO_SCTP, sctp(1000, 80, 0, 1))
	w.send(w.target, mac(3), etherType, b)
	_, from, err := c.ReadFrom(make([]byte, 1500))
	x.must(err)
	reply := sctp(80, 1000, 9, 2)
	for range 2 {
		_, err = c.WriteTo(reply, from)
		x.must(err)
		for {
			f, ok := w.receive()
			if !ok {
				t.Fatal("no SCTP reply")
			}
			if f.etherType == unix.ETH_P_IP && f.payload[9] == unix.IPPROTO_SCTP {
				if !slices.Equal(f.to, mac(3)) {
					t.Errorf("SCTP reply to %s", f.to)
				}
				break
			}
		}
		// An ICMP error about the flow through another peer does not move it.
		_, inner := packet(vip, client, unix.IPPROTO_SCTP, reply)
		tooBig, err := (&icmp.Message{Type: ipv4.ICMPTypeDestinationUnreachable, Code: 4, Body: &icmp.RawBody{
			Data: append([]byte{0, 0, 5, 20}, inner...),
		}}).Marshal(nil)
		x.must(err)
		etherType, b = packet(netip.MustParseAddr("10.8.0.1"), vip, unix.IPPROTO_ICMP, tooBig)
		w.send(w.target, mac(5), etherType, b)
		await.True(t, "path MTU", func() bool {
			return strings.Contains(x.sh(x.target, "ip route get 10.9.3.1 from 20.0.0.1"), "mtu 1300")
		})
	}

	stop()
	w.expectSilence(x)
}

// expectSilence sends ARP requests and neighbor solicitations for VIPs, and makes the target
// resolve the placeholder. The target must not reply, nor send requests with a VIP as sender
// address.
func (w *wire) expectSilence(x *fixture) {
	asker, own := netip.MustParseAddr("172.16.0.7"), netip.MustParseAddr("172.16.0.100")
	vip4, vip6, asker6 := netip.MustParseAddr(vips[0]), netip.MustParseAddr(vips[1]), netip.MustParseAddr("fd00:2::7")
	broadcast := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	ask := func(a netip.Addr) {
		w.send(broadcast, mac(7), unix.ETH_P_ARP, slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 1}, mac(7), asker.AsSlice(),
			make([]byte, 6), a.AsSlice()))
	}
	ask(vip4)
	option := append([]byte{1, 1}, mac(7)...)
	solicit, err := (&icmp.Message{Type: ipv6.ICMPTypeNeighborSolicitation, Body: &icmp.RawBody{
		Data: slices.Concat(make([]byte, 4), vip6.AsSlice(), option),
	}}).Marshal(icmp.IPv6PseudoHeader(asker6.AsSlice(), vip6.AsSlice()))
	x.must(err)
	etherType, b := packet(asker6, vip6, unix.IPPROTO_ICMPV6, solicit)
	b[7] = 255 // hop limit, RFC 4861
	w.send(w.target, mac(7), etherType, b)
	// Without the neighbor entry the kernel sends ARP requests for the placeholder from the VIP.
	x.sh(x.target, "ip neigh del 169.254.76.67 dev net0")
	etherType, b = echoRequest(netip.MustParseAddr("10.9.3.1"), vip4)
	w.send(w.target, mac(3), etherType, b)
	ask(own) // the last request to be answered
	for {
		f, ok := w.receive()
		switch {
		case !ok:
			w.Fatal("no answer for the target's own address")
		case f.etherType == unix.ETH_P_IPV6 && f.payload[6] == unix.IPPROTO_ICMPV6 && f.payload[40] == 136:
			if slices.Equal(f.payload[48:64], vip6.AsSlice()) {
				w.Error("a neighbor solicitation for a VIP was answered")
			}
		case f.etherType != unix.ETH_P_ARP:
		case slices.Equal(f.payload[14:18], vip4.AsSlice()):
			w.Errorf("ARP in the name of a VIP: % x", f.payload)
		case slices.Equal(f.payload[14:18], own.AsSlice()) && f.payload[7] == 2:
			return
		}
	}
}
