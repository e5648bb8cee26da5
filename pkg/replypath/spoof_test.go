package replypath

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// Flags of a TCP segment (RFC 9293).
const flagFIN, flagSYN, flagRST, flagACK = 0x01, 0x02, 0x04, 0x10

// segment returns a TCP segment without data in an IP packet.
func segment(from, to netip.AddrPort, seq, ack uint32, flags byte) (uint16, []byte) {
	b := binary.BigEndian.AppendUint16(nil, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint32(b, seq)
	b = binary.BigEndian.AppendUint32(b, ack)
	b = append(b, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
	pseudo := slices.Concat(from.Addr().AsSlice(), to.Addr().AsSlice(), []byte{0, unix.IPPROTO_TCP, 0, byte(len(b))})
	sum := uint32(0)
	for chunk := range slices.Chunk(append(pseudo, b...), 2) {
		sum += uint32(binary.BigEndian.Uint16(chunk))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(b[16:], ^uint16(sum+sum>>16))
	return packet(from.Addr(), to.Addr(), unix.IPPROTO_TCP, b)
}

// receiveTCP returns the target's next segment to a client and its destination link-layer address;
// false after a timeout.
func (w *wire) receiveTCP(to netip.AddrPort) (mac net.HardwareAddr, tcp []byte, ok bool) {
	for {
		f, ok := w.receive()
		if !ok {
			return nil, nil, false
		}
		header, protocol, destination := 20, 9, f.payload[16:]
		if f.etherType == unix.ETH_P_IPV6 {
			header, protocol, destination = 40, 6, f.payload[24:]
		} else if f.etherType != unix.ETH_P_IP {
			continue
		}
		address := to.Addr().AsSlice()
		if len(f.payload) >= header+20 && f.payload[protocol] == unix.IPPROTO_TCP &&
			slices.Equal(destination[:len(address)], address) && binary.BigEndian.Uint16(f.payload[header+2:]) == to.Port() {
			return f.to, f.payload[header:], true
		}
	}
}

// flowMark returns the connection mark of a TCP flow of the target, or "".
func (x *fixture) flowMark(from, to netip.AddrPort) string {
	x.Helper()
	tuple := fmt.Sprintf(" src=%s dst=%s sport=%d dport=%d ", from.Addr().StringExpanded(), to.Addr().StringExpanded(),
		from.Port(), to.Port())
	for line := range strings.Lines(x.sh(x.target, "cat /proc/net/nf_conntrack")) {
		if strings.Contains(line, tuple) {
			_, mark, _ := strings.Cut(line, " mark=")
			mark, _, _ = strings.Cut(mark, " ")
			return mark
		}
	}
	return ""
}

func markOf(mac string) string {
	hw, _ := net.ParseMAC(mac)
	return strconv.Itoa(int(fwmark(hw)))
}

// counter returns a TCP counter of the target, such as TCPSYNChallenge.
func (x *fixture) counter(name string) (n int) {
	x.Helper()
	lines := strings.Split(x.sh(x.target, "grep ^TcpExt: /proc/net/netstat"), "\n")
	if i := slices.Index(strings.Fields(lines[0]), name); i > 0 {
		n, _ = strconv.Atoi(strings.Fields(lines[1])[i])
	}
	return n
}

// hostile adds a host to the targets' network that forges source IP addresses.
func (x *fixture) hostile() *wire {
	ns := lab.NewNetNS(x)
	x.wire(ns, "int0", "int", "02:00:00:00:66:66", "172.16.0.66/24", "fd00:2::66/64")
	x.sh(x.target, "sysctl -qw net.ipv4.tcp_invalid_ratelimit=0")
	return newWire(x, ns, "int0", net.HardwareAddr{2, 0, 0, 0, 4, 0})
}

const hostileMAC = "02:00:00:00:66:66"

// SYN segments do not divert an established flow, because the challenge ACK contains its sequence
// numbers. All other packets of the flow move it.
func TestSpoofedSYN(t *testing.T) {
	x := newFixture(t, 2)
	p, _ := x.start(x.options())
	x.serve("80")
	x.complete(p)
	w := x.hostile()
	evil, _ := net.ParseMAC(hostileMAC)
	x.listen(x.client, "81")
	clients := []string{"192.168.0.100", "fd00:1::100"}
	type victim struct {
		*flow
		client, target netip.AddrPort
	}
	var victims []victim
	for i, v := range vips {
		inward := x.open("tcp", net.JoinHostPort(v, "80"))
		outward := x.openTCP(x.target, v, net.JoinHostPort(clients[i], "81"))
		victims = append(victims, victim{inward, addrPort(inward.LocalAddr()), addrPort(inward.RemoteAddr())},
			victim{outward, addrPort(outward.RemoteAddr()), addrPort(outward.LocalAddr())})
	}
	for _, f := range victims {
		for _, flags := range []byte{flagSYN, flagSYN | flagACK} {
			f.mustEcho(100)
			seen := func() int { return x.counter("TCPSYNChallenge") + x.invalid() }
			before := seen()
			etherType, b := segment(f.client, f.target, 1, 1, flags)
			w.send(w.target, evil, etherType, b)
			await.True(t, "segment of the host that forges", func() bool { return seen() > before })
			if mark, want := x.flowMark(f.client, f.target), markOf(podMAC(2, 0)); mark != want {
				t.Errorf("%s to %s: mark %s after flags %#x of another host, want %s", f.client, f.target, mark, flags, want)
			}
		}
	}
	// Replies to the forged addresses arrive before the reply to the host's own address.
	etherType, b := echoRequest(netip.MustParseAddr("172.16.0.66"), netip.MustParseAddr(vips[0]))
	w.send(w.target, evil, etherType, b)
	for {
		f, ok := w.receive()
		if !ok {
			t.Fatal("no answer to an own packet")
		}
		if f.etherType == unix.ETH_P_IP && f.payload[9] == unix.IPPROTO_ICMP {
			break
		}
		if f.etherType == unix.ETH_P_IP && f.payload[9] == unix.IPPROTO_TCP ||
			f.etherType == unix.ETH_P_IPV6 && f.payload[6] == unix.IPPROTO_TCP {
			t.Errorf("a segment to the host that forges: % x", f.payload)
		}
	}
	// Other packets move the flows.
	for _, pod := range []int{1, 0} {
		x.via(pod)
		for _, f := range victims {
			f.mustEcho(100)
			if mark, want := x.flowMark(f.client, f.target), markOf(podMAC(2, pod)); mark != want {
				t.Errorf("%s: mark %s through pod %d, want %s", f.target, mark, pod, want)
			}
		}
	}
}

// invalid counts the packets that the target's connection tracking classifies as invalid.
func (x *fixture) invalid() (n int) {
	x.Helper()
	for line := range strings.Lines(x.sh(x.target, "tail -n +2 /proc/net/stat/nf_conntrack")) {
		if words := strings.Fields(line); len(words) > 4 {
			invalid, _ := strconv.ParseInt(words[4], 16, 64)
			n += int(invalid)
		}
	}
	return n
}

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.TCPAddr).AddrPort() }

// openTCP opens a flow from an address of the pool.
func (x *fixture) openTCP(ns *lab.NetNS, source, address string) *flow {
	x.Helper()
	d := net.Dialer{Timeout: 5 * time.Second, Control: freebind, LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	var c net.Conn
	x.must(ns.Do(func() (err error) {
		c, err = d.DialContext(x.Context(), "tcp", address)
		return err
	}))
	x.Cleanup(func() { _ = c.Close() })
	return &flow{c, x}
}

// rawFlow is a TCP flow of a client through trench pods, built from raw segments.
type rawFlow struct {
	*wire
	client, target netip.AddrPort
	seq, ack       uint32
	acked          uint32 // by the target
}

// send sends a segment through a pod, and consumes a sequence number for SYN and FIN.
func (f *rawFlow) send(pod int, flags byte) {
	etherType, b := segment(f.client, f.target, f.seq, f.ack, flags)
	f.wire.send(f.wire.target, mac(pod), etherType, b)
	if flags&(flagSYN|flagFIN) != 0 {
		f.seq++
	}
}

// want expects the target's next segment with flags to a pod.
func (f *rawFlow) want(pod int, flags byte) {
	f.Helper()
	for {
		to, header, ok := f.receiveTCP(f.client)
		var got byte
		if ok {
			got = header[13]
		}
		switch {
		case !ok:
			f.Fatalf("%s: no segment with flags %#x", f.client, flags)
		case got&^8 != flags: // PSH
			continue
		case !slices.Equal(to, mac(pod)):
			f.Errorf("%s: flags %#x to %s, want pod %d", f.client, flags, to, pod)
		}
		f.acked = binary.BigEndian.Uint32(header[8:])
		if f.ack = binary.BigEndian.Uint32(header[4:]); flags&(flagSYN|flagFIN) != 0 {
			f.ack++
		}
		return
	}
}

// open opens the flow through a pod.
func (f *rawFlow) open(pod int) {
	f.Helper()
	f.send(pod, flagSYN)
	f.want(pod, flagSYN|flagACK)
	f.send(pod, flagACK)
}

// The SYN of a new flow sets its mark, even if an earlier flow had the same addresses and ports. A
// retransmitted SYN moves the handshake. If connection tracking assigns the SYN to the earlier
// flow, the first reply goes to the pod of that flow.
func TestSYNOfNewFlow(t *testing.T) {
	x, w := wireFixture(t)
	x.sh(x.target, "sysctl -qw net.ipv4.tcp_invalid_ratelimit=0")
	p, _ := x.start(x.options())
	x.listen(x.target, "80") // closes after FIN
	x.abort(x.target, "81")
	x.complete(p)
	const first, second = 1, 2
	port := uint16(1000)
	for name, use := range map[string]func(f *rawFlow){
		"SYN again within the handshake": func(f *rawFlow) {
			f.send(first, flagSYN)
			f.want(first, flagSYN|flagACK)
			f.seq--
			f.open(second)
		},
		"after RST of the client": func(f *rawFlow) {
			f.open(first)
			f.send(first, flagRST)
			f.open(second)
		},
		"TIME_WAIT": func(f *rawFlow) {
			f.open(first)
			f.send(first, flagFIN|flagACK)
			f.want(first, flagFIN|flagACK)
			f.send(first, flagACK)
			f.open(second)
		},
		"after RST of the application": func(f *rawFlow) {
			f.target = netip.AddrPortFrom(f.target.Addr(), 81)
			f.open(first)
			f.want(first, flagRST|flagACK)
			// Connection tracking cannot determine whether the SYN is new: the next packet moves the flow.
			f.seq += 1 << 30
			f.send(second, flagSYN)
			f.want(first, flagSYN|flagACK)
			f.send(second, flagACK)
			f.want(second, flagRST|flagACK)
		},
		"client without state": func(f *rawFlow) {
			f.open(first)
			f.seq += 1 << 30
			f.send(second, flagSYN)
			f.want(first, flagACK) // through the pod of the flow
			f.seq = f.acked
			f.send(second, flagRST)
			f.seq += 1 << 30
			f.open(second)
		},
	} {
		for i, client := range []string{"10.9.0.1", "fd09::1"} {
			port++
			f := &rawFlow{
				wire: w, client: netip.AddrPortFrom(netip.MustParseAddr(client), port),
				target: netip.AddrPortFrom(netip.MustParseAddr(vips[i]), 80), seq: 1 << 20,
			}
			t.Logf("%s: %s", f.client, name)
			use(f)
		}
	}
}

// abort resets each TCP connection to a port of a namespace until the test ends.
func (x *fixture) abort(ns *lab.NetNS, port string) {
	var l net.Listener
	x.must(ns.Do(func() (err error) {
		l, err = net.Listen("tcp", ":"+port)
		return err
	}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.(*net.TCPConn).SetLinger(0)
			_ = c.Close()
		}
	}()
	x.Cleanup(func() { _ = l.Close(); <-done })
}
