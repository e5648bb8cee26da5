package fwstate

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// remote is a TCP flow to a target that replies through a different pod.
type remote struct {
	family vip.Family
	conn   net.Conn
	reader *bufio.Reader
	target string
}

// open opens the flow from a port of the client.
func (r *remote) open(x *topology, port uint16) error {
	return x.client.Do(func() (err error) {
		local := netip.AddrPortFrom(estateClient[r.family], port)
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local), Timeout: patience}
		if r.conn, err = d.Dial("tcp", netip.AddrPortFrom(estateVIPs[r.family], estatePort).String()); err != nil {
			return err
		}
		if err = r.conn.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		r.reader = bufio.NewReader(r.conn)
		name, err := r.reader.ReadString('\n')
		r.target = strings.TrimSpace(name)
		return err
	})
}

// fetch makes the target send n bytes.
func (r remote) fetch(n int64) error {
	if _, err := fmt.Fprintln(r.conn, n); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, r.reader, n)
	return err
}

// serveWith restricts new flows to these targets and drains all remaining ones.
func (x *topology) serveWith(t *testing.T, fwmarks ...uint32) {
	t.Helper()
	f := x.fabrics[0]
	now, err := f.ReadStream("web")
	must(t, err)
	x.stream.Tables = bothFamilies(filled(estateSize, fwmarks...))
	must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: x.stream, Observed: now}}}))
}

// answerThrough makes the targets send all replies through the given pod.
func (x *topology) answerThrough(t *testing.T, pod int) {
	t.Helper()
	for _, g := range x.targets {
		g.ns.Shell(t, fmt.Sprintf("ip route replace default via 172.16.0.%[1]d; ip -6 route replace default via fd16::%[1]d",
			200+pod))
	}
}

// A pod that sees no packets of targets keeps flows on draining targets until the drain ends.
func TestRepliesThroughAnotherPod(t *testing.T) {
	x := newTopology(t, 2, 3, ConntrackLoose)
	x.answerThrough(t, 1)
	x.ownThrough(t, 0)
	var flows []remote
	datagrams := map[vip.Family]map[uint16]string{}
	for _, family := range vip.Families {
		datagrams[family] = map[uint16]string{}
		for port := uint16(26000); port < 26012; port++ {
			c, r, target := x.dial(t, family, port)
			flows = append(flows, remote{family, c, r, target})
			datagrams[family][port] = x.ask(t, family, port, 10)
		}
	}
	check := func(when string, size int64, moved map[string]string) {
		t.Helper()
		for _, f := range flows {
			if err := f.fetch(size); err != nil {
				t.Errorf("%s: TCP flow %s %s to %s: %v", when, f.family, f.conn.LocalAddr(), f.target, err)
			}
		}
		for family, ports := range datagrams {
			for port, target := range ports {
				if to, ok := moved[target]; ok {
					target = to
				}
				if got := x.ask(t, family, port, 10); got != target {
					t.Errorf("%s: UDP flow %s %d of %s went to %s", when, family, port, target, got)
				}
			}
		}
	}
	check("before", 10, nil)
	for _, pod := range []int{1, 0} {
		x.through(t, pod)
		check(fmt.Sprintf("the gateway moves the flows to pod %d", pod), 10, nil)
	}
	slow := x.openDuringChange(t)
	check("two targets drain", 10, nil)
	flows = append(flows, slow...)
	for _, family := range vip.Families {
		if got := x.ask(t, family, 26100, 10); got != "t0" {
			t.Errorf("a new %s flow went to %s, which drains", family, got)
		}
	}
	// The target learns the path MTU from ICMP errors, which contain a packet of the flow.
	x.router.Shell(t, "ip link set client mtu 1300")
	check("a path with a small MTU", 200_000, nil)

	list := x.pods[0].Shell(t, "nft list map inet vipgate-lb flows4; nft list map inet vipgate-lb flows6")
	for _, f := range flows {
		port := f.conn.LocalAddr().(*net.TCPAddr).Port
		if !remembered(list, port, "2h3m", "0x0000138") {
			t.Errorf("%s flow from port %d is not established in\n%s", f.family, port, list)
		}
	}
	closed := flows[0].conn.LocalAddr().(*net.TCPAddr).Port
	must(t, flows[0].conn.Close())
	flows = flows[1:]
	x.eventually(t, func() error {
		list = x.pods[0].Shell(t, "nft list map inet vipgate-lb flows4")
		if !remembered(list, closed, "(2m|1m)", "0x8000138") {
			return fmt.Errorf("port %d is not closing in\n%s", closed, list)
		}
		return nil
	})
	x.checkThroughVIP(t)
	if out := x.pods[0].Shell(t, "cat /proc/net/nf_conntrack 2>/dev/null || true"); strings.Contains(out, "dport=7000 ") {
		t.Errorf("the kernel tracks connections:\n%s", out)
	}

	// After a drain the flows of the target move to serving targets and remain there.
	gone := x.targets[1].slot
	gone.Flows = [len(vip.Families)]bool{}
	must(t, x.fabrics[0].Write(plan.Change{Targets: []plan.KernelTarget{gone}}))
	kept := flows[:0]
	for _, f := range flows {
		if f.target != "t1" {
			kept = append(kept, f)
		} else if err := f.fetch(10); err == nil {
			t.Errorf("%s TCP flow to a target that is gone is alive", f.family)
		}
	}
	flows = kept
	check("a target is gone", 10, map[string]string{"t1": "t0"})
	x.serveWith(t, 5002)
	check("all others serve", 10, map[string]string{"t1": "t0"})
}

// checkThroughVIP connects from the first pod to VIPs with a target's fwmark, like a health check.
func (x *topology) checkThroughVIP(t *testing.T) {
	t.Helper()
	d := net.Dialer{Timeout: patience, Control: func(_, _ string, c syscall.RawConn) error {
		var marked error
		err := c.Control(func(fd uintptr) { marked = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, 5002) })
		return errors.Join(err, marked)
	}}
	for _, v := range estateVIPs {
		must(t, x.pods[0].Do(func() error {
			c, err := d.Dial("tcp", netip.AddrPortFrom(v, estatePort).String())
			if err != nil {
				return err
			}
			return c.Close()
		}))
	}
}

// remembered reports whether a flow list contains a flow from this client port.
func remembered(list string, port int, expires, fwmark string) bool {
	flow := fmt.Sprintf(`tcp \. %d \. %d [^,]* expires %s[^,]*: %s`, port, estatePort, expires, fwmark)
	return regexp.MustCompile(flow).MatchString(list)
}

// openDuringChange opens flows whose first SYN arrives before all but one target drain, and
// whose handshake ends afterwards.
func (x *topology) openDuringChange(t *testing.T) (flows []remote) {
	t.Helper()
	const ports = 6
	wire := lab.NewCapture(t, x.pods[1], "int0")
	x.pods[1].Shell(t, `nft 'add table inet hold; add chain inet hold c { type filter hook prerouting priority -400; }
		add rule inet hold c tcp flags & (syn | ack) == syn | ack drop'`)
	opened := make(chan remote, 2*ports)
	var dials sync.WaitGroup
	for _, family := range vip.Families {
		for port := uint16(27000); port < 27000+ports; port++ {
			dials.Go(func() {
				f := remote{family: family}
				if err := f.open(x, port); err != nil {
					t.Errorf("%s flow from port %d: %v", family, port, err)
					return
				}
				opened <- f
			})
		}
	}
	answers := map[netip.AddrPort]bool{}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, wire.Wait(ctx, func(p lab.Packet) bool {
		if p.SrcPort == estatePort && p.DstPort >= 27000 && p.DstPort < 27000+ports {
			answers[netip.AddrPortFrom(p.Dst, p.DstPort)] = true
		}
		return len(answers) == 2*ports
	}))
	first := x.stream.Tables
	x.serveWith(t, 5000)
	x.pods[1].Shell(t, "nft delete table inet hold")
	dials.Wait()
	close(opened)
	drained := 0
	for f := range opened {
		t.Cleanup(func() { _ = f.conn.Close() })
		flows = append(flows, f)
		after := x.stream.Tables
		x.stream.Tables = first
		port := uint16(f.conn.LocalAddr().(*net.TCPAddr).Port)
		if want := x.expected(f.family, unix.IPPROTO_TCP, port); f.target != want {
			t.Errorf("%s flow from port %d went to %s, not to %s as its SYN", f.family, port, f.target, want)
		}
		x.stream.Tables = after
		if f.target != "t0" {
			drained++
		}
	}
	if drained == 0 {
		t.Error("no flow went to a target that drains")
	}
	return flows
}

func (x *topology) eventually(t *testing.T, condition func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, lab.Eventually(ctx, 10*time.Millisecond, condition))
}

// Flows beyond the size of the flow map use the Maglev table.
func TestFullFlowMapForwards(t *testing.T) {
	x := newTopology(t, 1, 2, ConntrackLoose)
	x.pods[0].Shell(t, `nft 'delete table inet vipgate-lb; add table inet vipgate-lb
		add map inet vipgate-lb flows4 { type ipv4_addr . ipv4_addr . inet_proto . inet_service . inet_service : mark
			flags dynamic, timeout; size 4; }'`)
	x.write(t, x.fabrics[0])
	for port := uint16(28000); port < 28020; port++ {
		if got, want := x.ask(t, vip.IPv4, port, 10), x.expected(vip.IPv4, unix.IPPROTO_UDP, port); got != want {
			t.Errorf("port %d went to %s, not to %s", port, got, want)
		}
	}
	if n := strings.Count(x.pods[0].Shell(t, "nft list map inet vipgate-lb flows4"), "expires"); n != 4 {
		t.Errorf("%d flows are remembered", n)
	}
	rules, err := x.fabrics[0].nft.Rules(inet, plan.StreamChain("web"))
	must(t, err)
	for _, r := range rules[plan.StreamChain("web")] {
		if r.Comment == ruleComment+"flows with ports, by @maglev4/web" && r.Packets < 16 {
			t.Errorf("%d packets of flows that are not remembered are counted", r.Packets)
		}
	}
}

// A client that reuses the ports of a closed flow begins a new one: it gets no draining target, and
// the timeout of an established flow.
func TestReusedPortsAreANewFlow(t *testing.T) {
	x := newTopology(t, 1, 2, ConntrackLoose)
	for _, family := range vip.Families {
		t.Run(family.String(), func(t *testing.T) {
			x.serveWith(t, 5000, 5001)
			const port = 26000
			listed := func(expires, fwmark string) func() error {
				return func() error {
					list := x.pods[0].Shell(t, "nft list map inet vipgate-lb "+flowMaps[family])
					if !remembered(list, port, expires, fwmark) {
						return fmt.Errorf("no flow of port %d with %s and %s in\n%s", port, expires, fwmark, list)
					}
					return nil
				}
			}
			flow, again := remote{family: family}, remote{family: family}
			must(t, flow.open(x, port))
			must(t, flow.fetch(10))
			must(t, errors.Join(flow.conn.(*net.TCPConn).SetLinger(0), flow.conn.Close()))
			x.eventually(t, listed("(2m|1m)", "0x8000138"))
			other := map[string]uint32{"t0": 5001, "t1": 5000}[flow.target]
			x.serveWith(t, other)
			must(t, again.open(x, port))
			must(t, again.fetch(10))
			if again.target == flow.target {
				t.Errorf("the new flow went to %s, which drains", again.target)
			}
			x.eventually(t, listed("2h3m", "0x0000138"))
			must(t, again.conn.Close())
		})
	}
}
