package midstream

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// wire exchanges single packets with the pod of a fixture in place of the client and its targets.
// All of its packets are sent on one processor, whose backlog keeps their order: a probe that
// arrives shows that each packet before it has arrived, too, or was dropped.
type wire struct {
	*fixture
	client  *tap
	targets map[int]*tap
	links   map[plan.LinkAddress]int
	probes  uint16
}

// tap is the interface of a host.
type tap struct {
	socket, index int
	own, pod      plan.LinkAddress
}

// frame is a received packet: of a client, or of a target's VIP.
type frame struct {
	family   vip.Family
	from, to uint16 // ports
	point    uint16 // code point
	packet   []byte
}

// clients are addresses that no host has, so that no kernel answers.
var clients = [...]netip.Addr{netip.MustParseAddr("10.9.0.77"), netip.MustParseAddr("fd09::77")}

const (
	probePort = 9
	// patience bounds waits for packets.
	patience = 30 * time.Second
)

func newWire(t *testing.T, returning bool) *wire {
	runtime.LockOSThread()
	var before, one unix.CPUSet
	harness.Must(t, unix.SchedGetaffinity(0, &before))
	for cpu := 0; one.Count() == 0; cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	x := newFixtureBy(t, everyone, returning)
	harness.Must(t, unix.SchedSetaffinity(0, &one))
	t.Cleanup(func() {
		harness.Must(t, unix.SchedSetaffinity(0, &before))
		runtime.UnlockOSThread()
	})
	w := &wire{fixture: x, targets: map[int]*tap{}, links: map[plan.LinkAddress]int{}}
	w.client = w.tap(x.client, "ext0", netip.MustParseAddr("10.9.0.77"), netip.MustParseAddr("fd09::77"))
	for i, ns := range x.targets {
		number := i + 1
		ns.Shell(t, "nft flush ruleset; ip addr del 20.0.0.1/32 dev lo; ip -6 addr del 2000::1/128 dev lo")
		w.targets[number] = w.tap(ns, fmt.Sprint("int", number),
			netip.MustParseAddr(fmt.Sprintf("172.16.%d.2", number)), netip.MustParseAddr(fmt.Sprintf("fd16:%d::2", number)))
		w.links[w.targets[number].own] = number
	}
	return w
}

// tap opens the interface of a host. The pod does not have to resolve its addresses: a packet that
// waits for that would be late.
func (w *wire) tap(ns *lab.NetNS, podDev string, addresses ...netip.Addr) *tap {
	var opened tap
	address := func(ns *lab.NetNS, dev string) (link plan.LinkAddress, index int) {
		harness.Must(w.t, ns.Do(func() error {
			device, err := net.InterfaceByName(dev)
			if err == nil {
				link, index = plan.LinkAddress(device.HardwareAddr), device.Index
			}
			return err
		}))
		return link, index
	}
	opened.pod, _ = address(w.pod, podDev)
	opened.own, opened.index = address(ns, "eth0")
	for _, neighbor := range addresses {
		w.pod.Shell(w.t, fmt.Sprintf("ip neigh replace %s lladdr %s dev %s nud permanent",
			neighbor, net.HardwareAddr(opened.own[:]), podDev))
	}
	all := int(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL)))
	harness.Must(w.t, ns.Do(func() (err error) {
		opened.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, all)
		if err != nil {
			return err
		}
		w.t.Cleanup(func() { harness.Must(w.t, unix.Close(opened.socket)) })
		if err := unix.SetsockoptInt(opened.socket, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1); err != nil {
			return err
		}
		return unix.Bind(opened.socket, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: opened.index})
	}))
	return &opened
}

// transmit sends a packet to the pod.
func (w *wire) transmit(from *tap, family vip.Family, packet []byte) {
	w.t.Helper()
	ether := append(append([]byte{}, from.pod[:]...), from.own[:]...)
	ether = append(ether, [][]byte{{0x08, 0x00}, {0x86, 0xdd}}[family]...)
	harness.Must(w.t, unix.Sendto(from.socket, append(ether, packet...), 0, &unix.SockaddrLinklayer{
		Ifindex: from.index, Halen: 6, Addr: [8]byte(append(from.pod[:], 0, 0)),
	}))
}

// receive returns the packets that arrived, in their order: of VIPs at the client, by target.
func (w *wire) receive() (client []frame, targets map[int][]frame) {
	w.t.Helper()
	w.probes++
	probe := ipPacket(unix.IPPROTO_UDP, netip.AddrPortFrom(clients[0], w.probes),
		netip.AddrPortFrom(netip.MustParseAddr("172.16.3.2"), probePort), make([]byte, 8))
	w.transmit(w.client, vip.IPv4, probe)
	targets = map[int][]frame{}
	for deadline := time.Now().Add(patience); ; {
		arrived := false
		for _, f := range w.targets[3].drain(w.t) {
			arrived = arrived || f.to == probePort && f.from == w.probes
			targets[3] = append(targets[3], f)
		}
		if arrived {
			break
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("probe %d did not arrive", w.probes)
		}
		poll := []unix.PollFd{{Fd: int32(w.targets[3].socket), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, int(patience/time.Millisecond)); err != nil && err != unix.EINTR {
			w.t.Fatal(err)
		}
	}
	others := func(f frame) bool { return f.to != port && f.from != port }
	for number, target := range w.targets {
		targets[number] = slices.DeleteFunc(append(targets[number], target.drain(w.t)...), others)
	}
	return slices.DeleteFunc(w.client.drain(w.t), others), targets
}

// drain reads the packets that have arrived.
func (tap *tap) drain(t *testing.T) (frames []frame) {
	t.Helper()
	for buf := make([]byte, 2048); ; {
		n, _, err := unix.Recvfrom(tap.socket, buf, 0)
		switch {
		case err == unix.EAGAIN:
			return frames
		case err == unix.EINTR:
			continue
		case err != nil:
			t.Fatal(err)
		}
		packet := slices.Clone(buf[14:n])
		switch kind := binary.BigEndian.Uint16(buf[12:]); {
		case kind == unix.ETH_P_IP && n >= 14+24:
			ports := binary.BigEndian.Uint32(packet[20:])
			frames = append(frames, frame{vip.IPv4, uint16(ports >> 16), uint16(ports), uint16(packet[1] >> 2), packet})
		case kind == unix.ETH_P_IPV6 && n >= 14+44:
			ports, point := binary.BigEndian.Uint32(packet[40:]), binary.BigEndian.Uint16(packet)>>6&0x3f
			frames = append(frames, frame{vip.IPv6, uint16(ports >> 16), uint16(ports), point, packet})
		}
	}
}

// isRST reports whether the frame is a TCP segment with RST.
func (f *frame) isRST() bool { return f.packet[[...]int{20, 40}[f.family]+flagsAt]&tcpRST != 0 }

// withPoint returns the packet with another code point.
func (f *frame) withPoint(point uint16) []byte {
	packet := slices.Clone(f.packet)
	if f.family == vip.IPv6 {
		first := binary.BigEndian.Uint16(packet)
		binary.BigEndian.PutUint16(packet, first&^(0x3f<<6)|point<<6)
		return packet
	}
	packet[1] = byte(point<<2) | packet[1]&3
	binary.BigEndian.PutUint16(packet[10:], 0)
	binary.BigEndian.PutUint16(packet[10:], ^checksum(packet[:20], 0))
	return packet
}

// tcpSegment returns a TCP segment without payload.
func tcpSegment(from, to netip.AddrPort, flags byte) []byte {
	header := make([]byte, 20)
	binary.BigEndian.PutUint32(header[4:], 1000)
	binary.BigEndian.PutUint32(header[8:], 2000)
	header[12], header[flagsAt] = 5<<4, flags
	binary.BigEndian.PutUint16(header[14:], 500)
	return ipPacket(unix.IPPROTO_TCP, from, to, header)
}

// sctpData returns an SCTP packet with an empty DATA chunk (RFC 9260).
func sctpData(from, to netip.AddrPort) []byte {
	packet := make([]byte, 12+16)
	binary.BigEndian.PutUint32(packet[4:], 7) // the verification tag
	packet[13], packet[15] = 3, 16
	return ipPacket(unix.IPPROTO_SCTP, from, to, packet)
}

// ipPacket returns an IP packet with the transport header, in which it sets ports and checksum.
func ipPacket(protocol byte, from, to netip.AddrPort, transport []byte) []byte {
	binary.BigEndian.PutUint16(transport, from.Port())
	binary.BigEndian.PutUint16(transport[2:], to.Port())
	addresses := append(from.Addr().AsSlice(), to.Addr().AsSlice()...)
	pseudo := uint32(protocol) + uint32(len(transport)) + uint32(checksum(addresses, 0))
	switch protocol {
	case unix.IPPROTO_TCP:
		binary.BigEndian.PutUint16(transport[16:], ^checksum(transport, pseudo))
	case unix.IPPROTO_UDP:
		binary.BigEndian.PutUint16(transport[4:], uint16(len(transport)))
		binary.BigEndian.PutUint16(transport[6:], ^checksum(transport, pseudo))
	case unix.IPPROTO_SCTP:
		sum := crc32.Checksum(transport, crc32.MakeTable(crc32.Castagnoli))
		binary.LittleEndian.PutUint32(transport[8:], sum)
	}
	if from.Addr().Is6() {
		header := []byte{0x60, 0, 0, 0, 0, byte(len(transport)), protocol, 64}
		return append(append(header, addresses...), transport...)
	}
	header := []byte{0x45, 0, 0, byte(20 + len(transport)), 0, 0, 0, 0, 64, protocol, 0, 0}
	header = append(header, addresses...)
	binary.BigEndian.PutUint16(header[10:], ^checksum(header, 0))
	return append(header, transport...)
}

// checksum returns the sum of RFC 1071, not complemented, of data with an even length.
func checksum(data []byte, sum uint32) uint16 {
	for i := 0; i < len(data); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(data[i:]))
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}
