package replypath

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
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

const link = "net0"

// vips are addresses of the pool of a fixture.
var vips = []string{"20.0.0.1", "2000::1"}

func pool(prefixes ...string) (list []netip.Prefix) {
	for _, p := range prefixes {
		list = append(list, netip.MustParsePrefix(p))
	}
	return list
}

// fixture is a client, trench pods and a target; pods and target share a bridge.
type fixture struct {
	testing.TB
	sw, client, target *lab.NetNS
	pods               []*lab.NetNS
}

func newFixture(t testing.TB, pods int) *fixture {
	x := &fixture{TB: t}
	for _, ns := range []**lab.NetNS{&x.sw, &x.client, &x.target} {
		*ns = lab.NewNetNS(t, lab.WithoutDAD)
	}
	x.must(x.sw.Batch("link add ext type bridge", "link add int type bridge", "link set ext up", "link set int up"))
	x.wire(x.client, "ext0", "ext", "02:00:00:00:01:00", "192.168.0.100/24", "fd00:1::100/64")
	x.wire(x.target, link, "int", "02:00:00:00:04:00", "172.16.0.100/24", "fd00:2::100/64")
	for i := range pods {
		pod := lab.NewNetNS(t, lab.WithoutDAD)
		x.pods = append(x.pods, pod)
		x.wire(pod, "ext0", "ext", podMAC(1, i), fmt.Sprintf("192.168.0.%d/24", i+1), fmt.Sprintf("fd00:1::%x/64", i+1))
		x.wire(pod, "int0", "int", podMAC(2, i), fmt.Sprintf("172.16.0.%d/24", i+1), fmt.Sprintf("fd00:2::%x/64", i+1))
		x.forward(pod)
	}
	x.via(0)
	return x
}

// podMAC returns the link-layer address of a pod in network 1 (clients) or 2 (targets).
func podMAC(network, pod int) string { return fmt.Sprintf("02:00:00:00:%02x:%02x", 10*network, pod) }

// forward configures a namespace as a trench pod. It drops packets that connection tracking
// classifies as invalid because it did not see the replies of their flow.
func (x *fixture) forward(pod *lab.NetNS) {
	for _, key := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
		x.must(pod.Sysctl(key, "1"))
	}
	x.sh(pod, `ip route add 20.0.0.0/8 via 172.16.0.100; ip -6 route add 2000::/16 via fd00:2::100
nft 'table inet f { chain forward { type filter hook forward priority 0; ct state invalid drop; }; }'
sysctl -qw net.netfilter.nf_conntrack_tcp_be_liberal=1`)
}

// wire connects a namespace to a bridge.
func (x *fixture) wire(ns *lab.NetNS, name, bridge, mac string, addresses ...string) {
	x.Helper()
	port := fmt.Sprintf("p%x", time.Now().UnixNano()&0xffffffffff)
	x.must(lab.Veth(ns, name, x.sw, port))
	x.must(ns.IP("link", "set", name, "address", mac))
	x.must(x.sw.IP("link", "set", port, "master", bridge))
	x.must(ns.Addr(name, addresses...))
}

// via routes the client's packets to the pool through a pod.
func (x *fixture) via(pod int) {
	x.must(x.client.Batch(fmt.Sprintf("route replace 20.0.0.0/8 via 192.168.0.%d", pod+1),
		fmt.Sprintf("route replace 2000::/16 via fd00:1::%x", pod+1)))
}

func (x *fixture) must(err error) {
	x.Helper()
	harness.Must(x, err)
}

func (x *fixture) sh(ns *lab.NetNS, command string) string {
	x.Helper()
	out, err := ns.Run(x.Context(), "sh", "-ec", command)
	if err != nil {
		x.Fatalf("%s: %v", command, err)
	}
	return out
}

func (x *fixture) options(prefixes ...string) Options {
	if prefixes == nil {
		prefixes = []string{"20.0.0.0/24", "2000::/64"}
	}
	return Options{Pool: pool(prefixes...), Interface: link, Log: slog.New(slog.NewTextHandler(x.Output(), nil))}
}

// start runs a Path in the target until the test ends, or the function that it returns is called.
func (x *fixture) start(o Options) (p *Path, stop func()) {
	p = New(o)
	return p, x.target.Background(x, p.Run)
}

// complete waits until the state is complete.
func (x *fixture) complete(p *Path) {
	x.Helper()
	await.True(x, "complete state", func() bool { return p.Status().Complete })
}

// serve echoes TCP and UDP of the VIPs on a port of the target until the test ends.
func (x *fixture) serve(port string) {
	x.listen(x.target, port)
	for _, v := range vips {
		x.listenUDP(x.target, v, port)
	}
}

// listenUDP echoes UDP on an address and port of a namespace until the test ends.
func (x *fixture) listenUDP(ns *lab.NetNS, address, port string) {
	var c net.PacketConn
	x.must(ns.Do(func() (err error) {
		c, err = (&net.ListenConfig{Control: freebind}).ListenPacket(x.Context(), "udp", net.JoinHostPort(address, port))
		return err
	}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b := make([]byte, 65536); ; {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b[:n], from)
		}
	}()
	x.Cleanup(func() { _ = c.Close(); <-done })
}

// listen echoes TCP on a port of a namespace until the test ends.
func (x *fixture) listen(ns *lab.NetNS, port string) {
	var l net.Listener
	x.must(ns.Do(func() (err error) {
		l, err = net.Listen("tcp", ":"+port)
		return err
	}))
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				stop := context.AfterFunc(x.Context(), func() { _ = c.Close() })
				_, _ = io.Copy(c, c)
				stop()
				_ = c.Close()
			})
		}
	})
	x.Cleanup(func() { _ = l.Close(); conns.Wait() })
}

// flow is an open connection of the client.
type flow struct {
	net.Conn
	t testing.TB
}

// open opens a flow from the client to an address.
func (x *fixture) open(network, address string) *flow {
	x.Helper()
	return x.openFrom(x.client, network, "", address)
}

func (x *fixture) openFrom(ns *lab.NetNS, network, source, address string) *flow {
	x.Helper()
	c, err := x.dial(ns, network, source, address)
	x.must(err)
	x.Cleanup(func() { _ = c.Close() })
	return &flow{c, x}
}

func (x *fixture) dial(ns *lab.NetNS, network, source, address string) (c net.Conn, err error) {
	d := net.Dialer{Timeout: 5 * time.Second}
	if source != "" {
		d.LocalAddr, d.Control = &net.UDPAddr{IP: net.ParseIP(source)}, freebind
	}
	err = ns.Do(func() (err error) {
		c, err = d.DialContext(x.Context(), network, address)
		return err
	})
	return c, err
}

// echo sends bytes and expects them back.
func (f *flow) echo(n int) error {
	if err := f.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := f.Write([]byte(strings.Repeat("x", n)))
		sent <- err
	}()
	_, err := io.ReadFull(f, make([]byte, n))
	if err != nil {
		_ = f.SetDeadline(time.Now())
	}
	if writeErr := <-sent; err == nil {
		err = writeErr
	}
	return err
}

func (f *flow) mustEcho(n int) {
	f.t.Helper()
	if err := f.echo(n); err != nil {
		f.t.Errorf("%s %s: %v", f.RemoteAddr().Network(), f.RemoteAddr(), err)
	}
}

// freebind allows a socket to bind an address before its local route is installed, and an IPv6
// address without an interface.
func freebind(_, _ string, c syscall.RawConn) (err error) {
	controlErr := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1)
	})
	if controlErr != nil {
		return controlErr
	}
	return err
}

// ping sends an ICMP echo request from the client and waits for the reply.
func (x *fixture) ping(address string) error {
	network, proto, kind := "ip4:icmp", 1, icmp.Type(ipv4.ICMPTypeEcho)
	if strings.Contains(address, ":") {
		network, proto, kind = "ip6:ipv6-icmp", 58, ipv6.ICMPTypeEchoRequest
	}
	return x.client.Do(func() error {
		c, err := net.ListenPacket(network, "")
		if err != nil {
			return err
		}
		defer c.Close()
		b, err := (&icmp.Message{Type: kind, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("vipgate")}}).Marshal(nil)
		if err != nil {
			return err
		}
		if _, err := c.WriteTo(b, &net.IPAddr{IP: net.ParseIP(address)}); err != nil {
			return err
		}
		if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return err
		}
		for answer := make([]byte, 1500); ; {
			n, from, err := c.ReadFrom(answer)
			if err != nil {
				return err
			}
			m, err := icmp.ParseMessage(proto, answer[:n])
			if echo, ok := m.Body.(*icmp.Echo); err == nil && ok && echo.ID == 7 && m.Type != kind && from.String() == address {
				return nil
			}
		}
	})
}
