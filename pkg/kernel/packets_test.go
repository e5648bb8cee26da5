package kernel

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// topology is a pod between three neighbours:
//
//	target --- int0 [ pod ] ext --- gateway (which routes to the client)
//	                  eth0 --- fabric (the pod's primary network)
//
// VIPs .1 live on the target, so that the pod forwards their traffic; VIPs .2 on the pod itself.
type topology struct {
	pod, fabric, gateway, target *lab.NetNS
	primary, external            *lab.Capture
	ports                        uint16
}

var (
	forwardedVIPs = vips("20.0.0.1/32", "2000::1/128")
	localVIPs     = vips("20.0.0.2/32", "2000::2/128")
	clients       = map[vip.Family]netip.Addr{
		vip.IPv4: netip.MustParseAddr("192.0.2.10"),
		vip.IPv6: netip.MustParseAddr("2001:db8:c::10"),
	}
	// Addresses of the pod and the target that are not VIPs.
	podAddrs = map[vip.Family]netip.Addr{
		vip.IPv4: netip.MustParseAddr("10.244.0.2"),
		vip.IPv6: netip.MustParseAddr("fd10::2"),
	}
	targetAddrs = map[vip.Family]netip.Addr{
		vip.IPv4: netip.MustParseAddr("172.16.0.1"),
		vip.IPv6: netip.MustParseAddr("fd16::1"),
	}
)

// startTopology creates a topology with an open gateway and a Routing that has confirmed all VIPs.
func startTopology(t *testing.T) *topology {
	t.Helper()
	x := newTopology(t)
	x.openGateway(t)
	r := start(t, x.pod, testOptions(t))
	r.Configure(allVIPs())
	r.waitConfirmed(t, allVIPs()...)
	return x
}

func newTopology(t *testing.T) *topology {
	t.Helper()
	x := &topology{
		pod: lab.NewNetNS(t), fabric: lab.NewNetNS(t), gateway: lab.NewNetNS(t), target: lab.NewNetNS(t),
		ports: 10000,
	}
	must(t, lab.Veth(x.pod, "eth0", x.fabric, "pod"))
	must(t, lab.Veth(x.pod, "ext", x.gateway, "pod"))
	must(t, lab.Veth(x.pod, "int0", x.target, "pod"))
	for _, ns := range []*lab.NetNS{x.pod, x.fabric, x.gateway, x.target} {
		must(t, ns.Sysctl("net.ipv4.ip_forward", "1"))
		must(t, ns.Sysctl("net.ipv6.conf.all.forwarding", "1"))
		must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", "0"))
	}
	for _, dev := range []string{"eth0", "ext", "int0"} {
		must(t, x.pod.Sysctl("net.ipv4.conf."+dev+".rp_filter", "0"))
	}
	must(t, x.pod.Addr("eth0", "10.244.0.2/24", "fd10::2/64"))
	must(t, x.fabric.Addr("pod", "10.244.0.1/24", "fd10::1/64"))
	must(t, x.pod.Addr("ext", "169.254.100.2/24", "fd64::2/64"))
	must(t, x.gateway.Addr("pod", "169.254.100.1/24", "fd64::1/64"))
	must(t, x.pod.Addr("int0", "172.16.0.2/24", "fd16::2/64"))
	must(t, x.target.Addr("pod", "172.16.0.1/24", "fd16::1/64"))
	must(t, x.pod.Addr("lo", "20.0.0.2/32", "2000::2/128"))
	must(t, x.target.Addr("lo", "20.0.0.1/32", "2000::1/128"))
	must(t, x.gateway.Addr("lo", "192.0.2.10/32", "2001:db8:c::10/128"))
	x.pod.Shell(t, `ip route add default via 10.244.0.1; ip -6 route add default via fd10::1
		ip route add 20.0.0.1 via 172.16.0.1; ip -6 route add 2000::1 via fd16::1`)
	x.target.Shell(t, `ip route add default via 172.16.0.2; ip -6 route add default via fd16::2`)
	x.gateway.Shell(t, `ip route add 20.0.0.0/16 via 169.254.100.2; ip -6 route add 2000::/64 via fd64::2`)
	x.primary, x.external = lab.NewCapture(t, x.pod, "eth0"), lab.NewCapture(t, x.pod, "ext")
	return x
}

// openGateway installs the routes that BIRD exports while gateways are up.
func (x *topology) openGateway(t *testing.T) {
	t.Helper()
	x.pod.Shell(t, `ip route add default via 169.254.100.1 dev ext table 4096 proto bird metric 32
		ip -6 route add default via fd64::1 dev ext table 4096 proto bird metric 32`)
}

func (x *topology) closeGateway(t *testing.T) {
	t.Helper()
	x.pod.Shell(t, `ip route del default table 4096; ip -6 route del default table 4096`)
}

// send sends one UDP packet from an address of a namespace. It returns the kernel's error
// unchanged, because an error is one form of a drop.
func send(t *testing.T, ns *lab.NetNS, from, to netip.Addr, port uint16,
	control func(string, string, syscall.RawConn) error,
) (sent error) {
	t.Helper()
	must(t, ns.Do(func() error {
		d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Control: control}
		c, err := d.Dial("udp", netip.AddrPortFrom(to, port).String())
		if err != nil {
			sent = err
			return nil
		}
		_, sent = c.Write([]byte("probe"))
		return c.Close()
	}))
	return sent
}

func toPort(from netip.Addr, port uint16) func(lab.Packet) bool {
	return func(p lab.Packet) bool { return p.Outgoing && p.Src == from && p.DstPort == port }
}

// fromVIP matches packets that must never leave by the primary interface.
func fromVIP(p lab.Packet) bool {
	return netip.MustParsePrefix("20.0.0.0/16").Contains(p.Src) || netip.MustParsePrefix("2000::/64").Contains(p.Src)
}

func waitPacket(t *testing.T, c *lab.Capture, what string, match func(lab.Packet) bool) {
	t.Helper()
	ctx := harness.Context(t, patience)
	if err := c.Wait(ctx, match); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// sendUntilSeen sends to the client until a packet is seen on its way out: while a neighbour is
// being resolved the kernel drops some.
func (x *topology) sendUntilSeen(t *testing.T, ns *lab.NetNS, from netip.Addr, on *lab.Capture) {
	t.Helper()
	x.ports++
	await.True(t, fmt.Sprintf("a packet from %s on its way", from), func() bool {
		if err := send(t, ns, from, clients[vip.FamilyOf(from)], x.ports, nil); err != nil {
			t.Fatalf("send from %s: %v", from, err)
		}
		return on.Count(toPort(from, x.ports)) > 0
	})
}

// flushPrimary sends forwarded and local packets from addresses that are not VIPs, and waits
// until they leave by the primary interface. A packet that leaked before has then been captured.
// It also checks that such traffic is not affected.
func (x *topology) flushPrimary(t *testing.T) {
	t.Helper()
	for _, f := range vip.Families {
		for ns, from := range map[*lab.NetNS]netip.Addr{x.pod: podAddrs[f], x.target: targetAddrs[f]} {
			x.sendUntilSeen(t, ns, from, x.primary)
		}
	}
}

// probe sends from every VIP. The packets must leave through the gateway if throughGateway is
// set, and must be dropped otherwise.
func (x *topology) probe(t *testing.T, throughGateway bool) {
	t.Helper()
	for _, v := range append(forwardedVIPs, localVIPs...) {
		from, ns := v.Prefix().Addr(), x.target
		if v == localVIPs[0] || v == localVIPs[1] {
			ns = x.pod
		}
		if throughGateway {
			x.sendUntilSeen(t, ns, from, x.external)
			continue
		}
		x.ports++
		_ = send(t, ns, from, clients[v.Family()], x.ports, nil)
	}
	x.flushPrimary(t)
	x.wantNoLeak(t)
	if !throughGateway {
		if n := x.external.Count(func(p lab.Packet) bool { return p.Outgoing && fromVIP(p) }); n > 0 {
			t.Errorf("%d packets left without a gateway", n)
		}
	}
}

func (x *topology) wantNoLeak(t *testing.T) {
	t.Helper()
	for _, p := range x.primary.Packets() {
		if fromVIP(p) {
			t.Fatalf("VIP traffic on the primary interface: %+v", p)
		}
	}
}

func allVIPs() []vip.VIP { return append(append([]vip.VIP{}, forwardedVIPs...), localVIPs...) }

func TestTopologyLeaksWithoutRouting(t *testing.T) {
	x := newTopology(t)
	x.openGateway(t)
	for _, v := range allVIPs() {
		ns := x.target
		if v == localVIPs[0] || v == localVIPs[1] {
			ns = x.pod
		}
		x.sendUntilSeen(t, ns, v.Prefix().Addr(), x.primary)
	}
}

func TestVIPTrafficUsesGatewayOrIsDropped(t *testing.T) {
	x := newTopology(t)
	r := start(t, x.pod, testOptions(t))
	r.Configure(allVIPs())
	r.waitConfirmed(t, allVIPs()...)
	t.Run("before any gateway", func(t *testing.T) { x.probe(t, false) })
	x.openGateway(t)
	t.Run("gateways there", func(t *testing.T) { x.probe(t, true) })
	x.closeGateway(t)
	x.external = lab.NewCapture(t, x.pod, "ext")
	t.Run("gateways gone", func(t *testing.T) { x.probe(t, false) })
	x.openGateway(t)
	must(t, x.pod.IP("link", "set", "ext", "down"))
	t.Run("external interface down", func(t *testing.T) { x.probe(t, false) })
}

func TestTCPFromVIPWorksThroughGateway(t *testing.T) {
	x := startTopology(t)
	for _, tt := range []struct {
		name     string
		ns       *lab.NetNS
		vip      vip.VIP
		incoming bool
	}{
		{"forwarded IPv4 out", x.target, forwardedVIPs[0], false},
		{"forwarded IPv6 out", x.target, forwardedVIPs[1], false},
		{"local IPv4 out", x.pod, localVIPs[0], false},
		{"local IPv6 out", x.pod, localVIPs[1], false},
		{"forwarded IPv4 in", x.target, forwardedVIPs[0], true},
		{"forwarded IPv6 in", x.target, forwardedVIPs[1], true},
		{"local IPv4 in", x.pod, localVIPs[0], true},
		{"local IPv6 in", x.pod, localVIPs[1], true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dialNS, from, listenNS, to := tt.ns, tt.vip.Prefix().Addr(), x.gateway, clients[tt.vip.Family()]
			if tt.incoming {
				dialNS, from, listenNS, to = listenNS, to, dialNS, from
			}
			var l net.Listener
			must(t, listenNS.Do(func() (err error) {
				l, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
				return err
			}))
			defer l.Close()
			echoed := make(chan error, 1)
			go func() {
				c, err := l.Accept()
				if err == nil {
					_, err = io.Copy(c, c)
					_ = c.Close()
				}
				echoed <- err
			}()
			var got []byte
			must(t, dialNS.Do(func() error {
				d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: patience}
				c, err := d.Dial("tcp", l.Addr().String())
				if err != nil {
					return err
				}
				defer c.Close()
				if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
					return err
				}
				// More than a segment, in both directions.
				if _, err := c.Write(make([]byte, 100_000)); err != nil {
					return err
				}
				if err := c.(*net.TCPConn).CloseWrite(); err != nil {
					return err
				}
				got, err = io.ReadAll(c)
				return err
			}))
			must(t, <-echoed)
			if len(got) != 100_000 {
				t.Errorf("got %d bytes back", len(got))
			}
		})
	}
	x.wantNoLeak(t)
}

func TestBoundSocketDoesNotLeak(t *testing.T) {
	x := startTopology(t)
	for _, v := range localVIPs {
		x.ports++
		_ = send(t, x.pod, v.Prefix().Addr(), clients[v.Family()], x.ports, func(_, _ string, c syscall.RawConn) error {
			var err error
			if e := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "eth0") }); e != nil {
				return e
			}
			return err
		})
	}
	x.flushPrimary(t)
	x.wantNoLeak(t)
}

func TestPrimaryNeighborsUnreachableFromVIP(t *testing.T) {
	x := startTopology(t)
	for _, v := range allVIPs() {
		ns, to := x.target, netip.MustParseAddr("10.244.0.1")
		if v == localVIPs[0] || v == localVIPs[1] {
			ns = x.pod
		}
		if v.Family() == vip.IPv6 {
			to = netip.MustParseAddr("fd10::1")
		}
		x.ports++
		must(t, send(t, ns, v.Prefix().Addr(), to, x.ports, nil))
		waitPacket(t, x.external, "from "+v.String(), toPort(v.Prefix().Addr(), x.ports))
	}
	x.flushPrimary(t)
	x.wantNoLeak(t)
}

func TestMarkKeepsTheBitsOutsideItsMask(t *testing.T) {
	x := newTopology(t)
	x.openGateway(t)
	x.pod.Shell(t, `nft 'add table inet probe; add chain inet probe post { type filter hook postrouting priority 0; }
		add rule inet probe post udp dport 7 meta mark 0x01000005 counter'`)
	r := start(t, x.pod, testOptions(t))
	r.Configure(allVIPs())
	r.waitConfirmed(t, allVIPs()...)
	for _, v := range localVIPs {
		// High bits of another mark are replaced, low ones stay.
		must(t, send(t, x.pod, v.Prefix().Addr(), clients[v.Family()], 7, func(_, _ string, c syscall.RawConn) error {
			var err error
			if e := c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, 0x42000005)
			}); e != nil {
				return e
			}
			return err
		}))
		waitPacket(t, x.external, "from "+v.String(), toPort(v.Prefix().Addr(), 7))
	}
	if out := x.pod.Shell(t, "nft list table inet probe"); !strings.Contains(out, "counter packets 2 ") {
		t.Errorf("want two packets with mark 0x01000005:\n%s", out)
	}
}

// pump sends from a VIP of the target until stop is called.
func (x *topology) pump(t *testing.T, from netip.Addr) (stop func()) {
	t.Helper()
	var c net.PacketConn
	must(t, x.target.Do(func() (err error) {
		c, err = net.ListenPacket("udp", netip.AddrPortFrom(from, 0).String())
		return err
	}))
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(clients[vip.FamilyOf(from)], 9))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(100 * time.Microsecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			if _, err := c.WriteTo([]byte("pump"), to); err != nil {
				t.Errorf("pump: %v", err)
				return
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	}()
	return func() {
		cancel()
		<-done
		_ = c.Close()
	}
}

func TestPrefixSwapNeverLeaks(t *testing.T) {
	x := newTopology(t)
	must(t, x.target.Addr("lo", "20.0.9.5/32", "2000::9:5/128"))
	r := start(t, x.pod, testOptions(t))
	narrow := vips("20.0.9.5/32", "2000::9:5/128")
	wide := vips("20.0.9.0/24", "2000::9:0/112")
	both := append(append([]vip.VIP{}, narrow...), wide...)
	r.Configure(narrow)
	r.waitConfirmed(t, narrow...)
	stop4 := x.pump(t, narrow[0].Prefix().Addr())
	stop6 := x.pump(t, narrow[1].Prefix().Addr())
	for range 20 {
		for _, set := range [][]vip.VIP{wide, narrow, both, narrow} {
			r.Configure(set)
			r.waitConfirmed(t, set...)
		}
	}
	stop4()
	stop6()
	x.flushPrimary(t)
	x.wantNoLeak(t)
}

const (
	childEnv  = "VIPGATE_KERNEL_TEST_CHILD"
	childSays = "confirmed"
)

// childMain runs only source routing in a process that the test kills.
func childMain() {
	r := New(Options{Log: slog.New(slog.DiscardHandler)})
	var list []vip.VIP
	for s := range strings.SplitSeq(os.Getenv(childEnv), ",") {
		list = append(list, vip.Require(s))
	}
	r.Configure(list)
	go func() {
		for {
			c, changed := r.Confirmed().Get()
			if len(c.VIPs) == len(list) {
				fmt.Println(childSays)
				return
			}
			<-changed
		}
	}()
	if err := r.Run(context.Background()); err != nil {
		fmt.Println(err)
	}
}

func startChild(t *testing.T, ns *lab.NetNS, list []vip.VIP) *exec.Cmd {
	t.Helper()
	var words []string
	for _, v := range list {
		words = append(words, v.String())
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(words, ","))
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, ns.Start(cmd))
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != childSays {
		t.Fatalf("child said %q, %v", line, err)
	}
	return cmd
}

func TestNoLeakAcrossRestart(t *testing.T) {
	x := newTopology(t)
	child := startChild(t, x.pod, allVIPs())
	stop4 := x.pump(t, forwardedVIPs[0].Prefix().Addr())
	stop6 := x.pump(t, forwardedVIPs[1].Prefix().Addr())
	must(t, child.Process.Kill())
	_ = child.Wait()
	t.Run("dead", func(t *testing.T) { x.probe(t, false) })

	r := start(t, x.pod, testOptions(t))
	r.waitReady(t)
	t.Run("restarted, not configured yet", func(t *testing.T) { x.probe(t, false) })
	more := append(allVIPs(), vips("20.0.0.3/32", "20.0.0.0/32", "2000::3/128")...)
	r.Configure(more)
	r.waitConfirmed(t, more...)
	r.Configure(allVIPs())
	r.waitConfirmed(t, allVIPs()...)
	r.stop()
	t.Run("stopped in order", func(t *testing.T) { x.probe(t, false) })
	x.openGateway(t)
	stop4()
	stop6()
	x.external = lab.NewCapture(t, x.pod, "ext")
	t.Run("gateways without a frontend", func(t *testing.T) { x.probe(t, true) })
}
