package fwstate

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// topology is where packets go:
//
//	client --- router --- ext [ pods ] int0 --- switch --- targets
//
// VIPs are on the lo of each target, whose default route is the first pod.
type topology struct {
	client, router, fabricNet *lab.NetNS
	pods                      []*lab.NetNS
	fabrics                   []*Conn
	targets                   []*topologyTarget
	stream                    plan.KernelStream
	programs                  []*fastpath.Program // by pod, without the fast path none
}

type topologyTarget struct {
	ns       *lab.NetNS
	slot     plan.KernelTarget
	mu       sync.Mutex
	received map[netip.AddrPort]int
}

func newTopology(t *testing.T, pods, targets int, mode Conntrack) *topology {
	t.Helper()
	x := &topology{}
	for _, ns := range []**lab.NetNS{&x.client, &x.router, &x.fabricNet} {
		*ns = lab.NewNetNS(t, lab.WithoutDAD)
	}
	forward := func(ns *lab.NetNS) {
		for _, key := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
			must(t, ns.Sysctl(key, "1"))
		}
		must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", "0"))
		must(t, ns.Sysctl("net.ipv4.conf.default.rp_filter", "0"))
	}
	forward(x.router)
	must(t, lab.Veth(x.client, "eth0", x.router, "client"))
	must(t, x.client.Addr("eth0", "10.9.0.1/24", "fd09::1/64"))
	must(t, x.router.Addr("client", "10.9.0.254/24", "fd09::fe/64"))
	x.client.Shell(t, "ip route add default via 10.9.0.254; ip -6 route add default via fd09::fe")
	x.router.Shell(t, "ip link add ext type bridge; ip link set ext up")
	must(t, x.router.Addr("ext", "169.254.100.254/24", "fd64::fe/64"))
	x.fabricNet.Shell(t, "ip link add br0 type bridge; ip link set br0 up")
	o := Config{Conntrack: mode}
	for i := range pods {
		pod := lab.NewNetNS(t, lab.WithoutDAD)
		forward(pod)
		must(t, lab.Veth(pod, "ext", x.router, fmt.Sprintf("pod%d", i)))
		must(t, lab.Veth(pod, "int0", x.fabricNet, fmt.Sprintf("pod%d", i)))
		x.router.Shell(t, fmt.Sprintf("ip link set pod%d master ext", i))
		x.fabricNet.Shell(t, fmt.Sprintf("ip link set pod%d master br0", i))
		must(t, pod.Addr("ext", fmt.Sprintf("169.254.100.%d/24", 1+i), fmt.Sprintf("fd64::%d/64", 1+i)))
		must(t, pod.Addr("int0", fmt.Sprintf("172.16.0.%d/24", 200+i), fmt.Sprintf("fd16::%d/64", 200+i)))
		pod.Shell(t, "ip route add default via 169.254.100.254; ip -6 route add default via fd64::fe")
		x.pods = append(x.pods, pod)
		x.fabrics = append(x.fabrics, openConn(t, pod, o))
	}
	for i := range targets {
		g := &topologyTarget{ns: lab.NewNetNS(t, lab.WithoutDAD), received: map[netip.AddrPort]int{}}
		must(t, lab.Veth(g.ns, "eth0", x.fabricNet, fmt.Sprintf("t%d", i)))
		x.fabricNet.Shell(t, fmt.Sprintf("ip link set t%d master br0", i))
		g.slot = plan.KernelTarget{
			FWMark: uint32(5000 + i), Label: plan.Label{Stream: "web", Name: fmt.Sprintf("t%d", i)},
			Flows: [len(vip.Families)]bool{true, true},
		}
		g.slot.NextHops = [len(vip.Families)]netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("172.16.0.%d", 1+i)),
			netip.MustParseAddr(fmt.Sprintf("fd16::%d", 1+i)),
		}
		must(t, g.ns.Addr("eth0", g.slot.NextHops[0].String()+"/24", g.slot.NextHops[1].String()+"/64"))
		must(t, g.ns.Addr("lo", "20.0.0.1/32", "2000::1/128"))
		g.ns.Shell(t, "ip route add default via 172.16.0.200; ip -6 route add default via fd16::200")
		g.serve(t)
		x.targets = append(x.targets, g)
	}
	x.stream = plan.KernelStream{
		Name: "web", Size: estateSize, Seed: estateSeed,
		Tables: bothFamilies(filled(estateSize, x.numbers()...)),
	}
	for _, f := range x.fabrics {
		x.write(t, f)
		for n, err := range f.AddRoutes(x.slots(), true) {
			t.Fatal(n, err)
		}
	}
	x.through(t, 0)
	return x
}

// write writes the table of a pod.
func (x *topology) write(t *testing.T, f *Conn) {
	t.Helper()
	must(t, f.Write(plan.Change{
		Base: true, Targets: x.slots(), Streams: []plan.StreamWrite{{Desired: x.stream}},
		VIPs: map[vip.VIP]string{vip.Require("20.0.0.1/32"): "web", vip.Require("2000::1/128"): "web"},
	}))
}

func (x *topology) numbers() []uint32 {
	var numbers []uint32
	for _, g := range x.targets {
		numbers = append(numbers, g.slot.FWMark)
	}
	return numbers
}

func (x *topology) slots() []plan.KernelTarget {
	var slots []plan.KernelTarget
	for _, g := range x.targets {
		slots = append(slots, g.slot)
	}
	return slots
}

// through makes the router send packets to VIPs through a pod.
func (x *topology) through(t *testing.T, pod int) {
	t.Helper()
	x.router.Shell(t, fmt.Sprintf("ip route replace 20.0.0.1 via 169.254.100.%d; ip -6 route replace 2000::1 via fd64::%d",
		1+pod, 1+pod))
}

// ownThrough makes the router send its own packets to VIPs, which are ICMP errors,
// through a pod.
func (x *topology) ownThrough(t *testing.T, pod int) {
	t.Helper()
	x.router.Shell(t, fmt.Sprintf(`ip rule add iif lo lookup 7; ip -6 rule add iif lo lookup 7
		ip route replace 20.0.0.1 via 169.254.100.%[1]d table 7; ip -6 route replace 2000::1 via fd64::%[1]d table 7`,
		1+pod))
}

// serve answers UDP with the target's name and counts the bytes from each source; over TCP it
// sends its name, and then as many bytes as each line requests.
func (g *topologyTarget) serve(t *testing.T) {
	t.Helper()
	for _, v := range estateVIPs {
		var done sync.WaitGroup
		at := netip.AddrPortFrom(v, estatePort)
		var udp *net.UDPConn
		var tcp net.Listener
		must(t, g.ns.Do(func() (err error) {
			if udp, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)); err != nil {
				return err
			}
			tcp, err = net.Listen("tcp", at.String())
			return err
		}))
		raw, err := udp.SyscallConn()
		must(t, err)
		must(t, raw.Control(func(fd uintptr) {
			must(t,
				unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20))
		}))
		var mu sync.Mutex
		conns := map[net.Conn]bool{}
		t.Cleanup(func() {
			must(t, errors.Join(udp.Close(), tcp.Close()))
			mu.Lock()
			for c := range conns {
				_ = c.Close()
			}
			mu.Unlock()
			done.Wait()
		})
		done.Go(func() {
			b := make([]byte, 10000)
			for {
				n, from, err := udp.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				g.mu.Lock()
				g.received[netip.AddrPortFrom(from.Addr().Unmap(), from.Port())] += n
				g.mu.Unlock()
				_, _ = udp.WriteToUDPAddrPort([]byte(g.slot.Name), from)
			}
		})
		done.Go(func() {
			for {
				c, err := tcp.Accept()
				if err != nil {
					return
				}
				mu.Lock()
				conns[c] = true
				mu.Unlock()
				done.Go(func() {
					defer c.Close()
					_, _ = fmt.Fprintln(c, g.slot.Name)
					r := bufio.NewReader(c)
					for {
						var n int64
						if _, err := fmt.Fscanln(r, &n); err != nil {
							return
						}
						if _, err := io.CopyN(c, zeros{}, n); err != nil {
							return
						}
					}
				})
			}
		})
	}
}

type zeros struct{}

func (g *topologyTarget) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.received)
}

// ask sends datagrams from a port until a target replies, and returns the target's name.
func (x *topology) ask(t testing.TB, family vip.Family, port uint16, size int) string {
	t.Helper()
	var c *net.UDPConn
	must(t, x.client.Do(func() (err error) {
		c, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(estateClient[family], port)),
			net.UDPAddrFromAddrPort(netip.AddrPortFrom(estateVIPs[family], estatePort)))
		return err
	}))
	defer c.Close()
	b := make([]byte, 100)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if _, err := c.Write(make([]byte, size)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		must(t, c.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
		if n, err := c.Read(b); err == nil {
			return string(b[:n])
		}
	}
	t.Fatalf("no target answered %s port %d, %d bytes\n%s", family, port, size,
		x.pods[0].Shell(t, "nft list table inet vipgate-lb | grep -v elements | grep -v 0x000; ip -s neigh; ip -s link"))
	return ""
}

// ping sends echo requests until one is answered.
func (x *topology) ping(t testing.TB, family vip.Family) {
	t.Helper()
	network, request, reply := "ip4:icmp", []byte{8, 0, 0xf7, 0xf8, 0, 7, 0, 0}, byte(0)
	if family == vip.IPv6 { // the kernel fills the checksum in
		network, request, reply = "ip6:ipv6-icmp", []byte{128, 0, 0, 0, 0, 7, 0, 0}, 129
	}
	var c net.PacketConn
	must(t, x.client.Do(func() (err error) {
		c, err = net.ListenPacket(network, estateClient[family].String())
		return err
	}))
	defer c.Close()
	b := make([]byte, 1500)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		_, err := c.WriteTo(request, &net.IPAddr{IP: estateVIPs[family].AsSlice()})
		must(t, err)
		must(t, c.SetReadDeadline(time.Now().Add(time.Second)))
		if n, from, err := c.ReadFrom(b); err == nil && n > 0 && b[0] == reply &&
			from.String() == estateVIPs[family].String() {
			return
		}
	}
	t.Fatalf("no answer to an echo request to %s", estateVIPs[family])
}

// dial opens a TCP connection and returns the name of the target that accepted it.
func (x *topology) dial(t testing.TB, family vip.Family, port uint16) (net.Conn, *bufio.Reader, string) {
	t.Helper()
	var c net.Conn
	must(t, x.client.Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(estateClient[family], port)), Timeout: patience}
		c, err = d.Dial("tcp", netip.AddrPortFrom(estateVIPs[family], estatePort).String())
		return err
	}))
	t.Cleanup(func() { _ = c.Close() })
	must(t, c.SetDeadline(time.Now().Add(patience)))
	r := bufio.NewReader(c)
	name, err := r.ReadString('\n')
	must(t, err)
	return c, r, strings.TrimSpace(name)
}

// expected computes the target that the kernel selects for a flow.
func (x *topology) expected(family vip.Family, proto byte, sourcePort uint16) string {
	var b []byte
	b = append(b, estateClient[family].AsSlice()...)
	b = append(b, estateVIPs[family].AsSlice()...)
	b = append(b, proto, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, sourcePort)
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint16(b, estatePort)
	b = append(b, 0, 0)
	i := nft.Hash(b, estateSeed, estateSize)
	return fmt.Sprintf("t%d", x.stream.Tables[family][i]-5000)
}

// eachMode runs a test with three targets and each kind of connection tracking, and with the fast
// path in front of the last kind.
func eachMode(t *testing.T, pods int, test func(t *testing.T, x *topology, mode Conntrack)) {
	for mode := range Conntrack(len(conntrackNames)) {
		t.Run(mode.String(), func(t *testing.T) {
			test(t, newTopology(t, pods, 3, mode), mode)
		})
	}
	t.Run("fast path", func(t *testing.T) {
		x := newTopology(t, pods, 3, ConntrackOff)
		x.accelerate(t)
		test(t, x, ConntrackOff)
		if x.taken(t) == 0 {
			t.Error("the fast path forwarded no packet")
		}
	})
}

// sendUntilReceived sends a datagram from each of many ports until the targets have received one
// from each: the queues of a busy machine drop some.
func (x *topology) sendUntilReceived(t *testing.T, family vip.Family, first, flows int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var sent time.Time
	must(t, lab.Eventually(ctx, 10*time.Millisecond, func() error {
		if time.Since(sent) > time.Second {
			if err := x.client.Do(func() error { return sendFrom(family, first, flows) }); err != nil {
				return err
			}
			sent = time.Now()
		}
		n := 0
		for _, g := range x.targets {
			n += g.count()
		}
		if n < flows {
			return fmt.Errorf("%d of %d flows came", n, flows)
		}
		return nil
	}))
}

// sendFrom sends a datagram from each of many ports.
func sendFrom(family vip.Family, first, n int) error {
	domain := unix.AF_INET
	if family == vip.IPv6 {
		domain = unix.AF_INET6
	}
	address := func(a netip.Addr, port int) unix.Sockaddr {
		if family == vip.IPv4 {
			return &unix.SockaddrInet4{Addr: a.As4(), Port: port}
		}
		return &unix.SockaddrInet6{Addr: a.As16(), Port: port}
	}
	for port := first; port < first+n; port++ {
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		err = errors.Join(unix.Bind(fd, address(estateClient[family], port)),
			unix.Sendto(fd, []byte("flow"), 0, address(estateVIPs[family], estatePort)), unix.Close(fd))
		if err != nil {
			return err
		}
	}
	return nil
}
