package fwstate

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// accelerate attaches the fast path in all pods.
func (x *topology) accelerate(t *testing.T) {
	t.Helper()
	if err := x.pods[0].Do(fastpath.Probe); err != nil {
		lab.Skip(t, err.Error())
	}
	for range x.pods {
		program := fastpath.New()
		t.Cleanup(func() { must(t, program.Detach()) })
		x.programs = append(x.programs, program)
	}
	x.refresh(t)
}

// refresh applies the state of nftables to the fast path, if it is attached.
func (x *topology) refresh(t *testing.T) {
	t.Helper()
	for pod, program := range x.programs {
		conn := x.fabrics[pod]
		stream, err := conn.ReadStream("web")
		must(t, err)
		vips, err := conn.ReadVIPs()
		must(t, err)
		network, err := conn.ReadNetwork()
		must(t, err)
		content := fastpath.Content{
			Hops: map[fastpath.Target]fastpath.Hop{}, Streams: []fastpath.Stream{{KernelStream: stream}},
		}
		for v := range vips {
			content.Streams[0].VIPs = append(content.Streams[0].VIPs, v)
		}
		for _, target := range x.slots() {
			for _, family := range vip.Families {
				if link, ok := network.LinkTo(target.NextHops[family]); ok {
					content.Hops[fastpath.Target{FWMark: target.FWMark, Family: family}] = fastpath.Hop{
						Address: target.NextHops[family], Link: link.Index, MTU: link.MTU,
					}
				}
			}
		}
		must(t, x.pods[pod].Do(func() error {
			list, err := program.Apply(content, network.Links)
			for _, at := range list {
				if at.Reason != "" {
					err = errors.Join(err, fmt.Errorf("%s: %s", at.Name, at.Reason))
				}
			}
			return err
		}))
	}
}

// taken returns the number of packets that the fast path forwarded in all pods.
func (x *topology) taken(t *testing.T) (packets uint64) {
	t.Helper()
	for _, program := range x.programs {
		must(t, program.Verify())
		counters, err := program.Counters()
		must(t, err)
		for _, counter := range counters {
			packets += counter.Packets
		}
	}
	return packets
}

// The model, nftables and the fast path select the same target for 20 000 flows.
func TestFastPathAgrees(t *testing.T) {
	x := newTopology(t, 1, 3, ConntrackOff)
	const first, flows = 10_000, 10_000
	x.accelerate(t)
	for _, family := range vip.Families {
		for port := uint16(30000); port < 30020; port++ {
			x.ask(t, family, port, 10) // resolves the neighbors
		}
		for _, attached := range []bool{true, false} {
			for _, g := range x.targets {
				g.mu.Lock()
				clear(g.received)
				g.mu.Unlock()
			}
			before := x.taken(t)
			x.sendUntilReceived(t, family, first, flows)
			wrong := 0
			for _, g := range x.targets {
				g.mu.Lock()
				for from := range g.received {
					if g.slot.Name != x.expected(family, unix.IPPROTO_UDP, from.Port()) {
						wrong++
					}
				}
				g.mu.Unlock()
			}
			if wrong > 0 {
				t.Errorf("%s: %d of %d flows reached another target than in the model, fast path attached: %t",
					family, wrong, flows, attached)
			}
			if n := x.taken(t) - before; attached != (n >= flows) || !attached && n > 0 {
				t.Errorf("%s: the fast path forwarded %d packets of %d flows, attached: %t", family, n, flows, attached)
			}
			if attached {
				must(t, x.programs[0].Detach())
				continue
			}
			x.refresh(t)
		}
	}
}

// option is an option of a socket: an int, or a string of bytes.
type option struct {
	level, name int
	value       any
}

func (o option) set(socket int) error {
	if text, ok := o.value.(string); ok {
		return unix.SetsockoptString(socket, o.level, o.name, text)
	}
	return unix.SetsockoptInt(socket, o.level, o.name, o.value.(int))
}

// converse sends datagrams from a socket with options until an answer or an error arrives.
func (x *topology) converse(t *testing.T, family vip.Family, port uint16, size int, options ...option) (string, error) {
	t.Helper()
	control := func(_, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(socket uintptr) {
			for _, each := range options {
				err = errors.Join(err, each.set(int(socket)))
			}
		})
		return errors.Join(controlErr, err)
	}
	var conn net.Conn
	must(t, x.client.Do(func() (err error) {
		from := net.UDPAddrFromAddrPort(netip.AddrPortFrom(estateClient[family], port))
		dialer := net.Dialer{LocalAddr: from, Control: control}
		conn, err = dialer.Dial("udp", netip.AddrPortFrom(estateVIPs[family], estatePort).String())
		return err
	}))
	defer conn.Close()
	answer := make([]byte, 100)
	for end := time.Now().Add(patience); ; {
		if _, err := conn.Write(make([]byte, size)); err != nil {
			return "", err
		}
		must(t, conn.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
		n, err := conn.Read(answer)
		if err == nil || !isTimeout(err) || time.Now().After(end) {
			return string(answer[:n]), err
		}
	}
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

// Packets with a special case continue to nftables, which answers or forwards them.
func TestFastPathLeavesSpecialCases(t *testing.T) {
	x := newTopology(t, 1, 3, ConntrackOff)
	x.accelerate(t)
	must(t, x.fabrics[0].Write(plan.Change{VIPs: map[vip.VIP]string{
		vip.Require("20.0.1.0/24"): "web", vip.Require("2000:1::/64"): "web",
	}}))
	x.router.Shell(t, "ip route add 20.0.1.0/24 via 169.254.100.1; ip -6 route add 2000:1::/64 via fd64::1")
	x.pods[0].Shell(t, "ip link set int0 mtu 1300")
	x.refresh(t)
	wide := [...]string{"20.0.1.7", "2000:1::7"}
	for _, family := range vip.Families {
		to := estateVIPs[family]
		hopLimit := option{unix.IPPROTO_IP, unix.IP_TTL, 2}
		errorQueue := option{unix.IPPROTO_IP, unix.IP_RECVERR, 1}
		unfragmented := option{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE}
		header := option{unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x00"} // three no-operations, end
		if family == vip.IPv6 {
			hopLimit = option{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 2}
			errorQueue = option{unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1}
			unfragmented = option{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE}
			header = option{unix.IPPROTO_IPV6, unix.IPV6_DSTOPTS, "\x00\x00\x01\x04\x00\x00\x00\x00"} // padding
		}
		// The fast path forwards ordinary packets, so the cases below do not pass by its absence.
		port := uint16(26000)
		for before := x.taken(t); x.taken(t) == before; port++ {
			x.ask(t, family, port, 10)
		}
		arrives := func(err error, name string) error {
			if want := x.expected(family, unix.IPPROTO_UDP, port); err != nil || name != want {
				return fmt.Errorf("it reached %q, %v; want %s", name, err, want)
			}
			return nil
		}
		rejected := func(err error, want unix.Errno) error {
			if !errors.Is(err, want) {
				return fmt.Errorf("the client got %v, not %v", err, want)
			}
			return nil
		}
		cases := map[string]func() error{
			"hop limit 1": func() error {
				_, err := x.converse(t, family, port, 10, hopLimit, errorQueue)
				return rejected(err, unix.EHOSTUNREACH)
			},
			"too big": func() error {
				_, err := x.converse(t, family, port, 1400, unfragmented, errorQueue)
				return rejected(err, unix.EMSGSIZE)
			},
			"fragments": func() error {
				name, err := x.converse(t, family, port, 4000)
				// The client learns the MTU behind the pod, unless a case before taught it.
				if errors.Is(err, unix.EMSGSIZE) {
					name, err = x.converse(t, family, port, 4000)
				}
				return arrives(err, name)
			},
			"options or extension header": func() error {
				name, err := x.converse(t, family, port, 10, header)
				return arrives(err, name)
			},
			"echo request": func() error { x.ping(t, family); return nil },
			"wide VIP": func() error {
				x.counted(t, "a wide VIP", 0, 1, sendUDP(netip.MustParseAddr(wide[family]), estatePort))
				return nil
			},
			"unknown protocol": func() error {
				x.counted(t, "GRE", 0, 1, sendRaw(unix.IPPROTO_GRE, to, 0, 0, 0, 0))
				return nil
			},
		}
		for name, run := range cases {
			// A request that was sent again may still be on its way and count: once, not each time.
			forwarded := uint64(1)
			for range 3 {
				before := x.taken(t)
				if err := run(); err != nil {
					t.Errorf("%s, %s: %v", family, name, err)
				}
				if forwarded = x.taken(t) - before; forwarded == 0 {
					break
				}
			}
			if forwarded > 0 {
				t.Errorf("%s, %s: the fast path forwarded %d packets", family, name, forwarded)
			}
			port++
		}
		// If the segments of a large packet do not fit, the client learns the MTU.
		x.client.Shell(t, "ip route flush cache; ip -6 route flush cache")
		before := x.taken(t)
		conn, reader, _ := x.dial(t, family, port)
		_, err := fmt.Fprintln(conn, strings.Repeat("0", 200_000)+"7")
		must(t, err)
		if _, err := io.CopyN(io.Discard, reader, 7); err != nil {
			t.Errorf("%s: an upload over a smaller MTU: %v", family, err)
		}
		if route := x.client.Shell(t, "ip route get "+to.String()); !strings.Contains(route, "mtu 1300") {
			t.Errorf("%s: the client did not learn the MTU: %s", family, route)
		}
		if x.taken(t) == before {
			t.Errorf("%s: the fast path forwarded nothing of an upload", family)
		}
	}
}

// A suspended stream continues to nftables until the next change, without a packet lost.
func TestFastPathSuspends(t *testing.T) {
	x := newTopology(t, 1, 3, ConntrackOff)
	x.accelerate(t)
	program := x.programs[0]
	for _, family := range vip.Families {
		x.ask(t, family, 26000, 10)
		must(t, program.Suspend("web"))
		before := x.taken(t)
		x.ask(t, family, 26001, 10)
		if n := x.taken(t) - before; n > 0 {
			t.Errorf("%s: the fast path forwarded %d packets of a suspended stream", family, n)
		}
		x.refresh(t)
		x.ask(t, family, 26001, 10)
		if x.taken(t) == before {
			t.Errorf("%s: the fast path did not resume", family)
		}
	}
}
