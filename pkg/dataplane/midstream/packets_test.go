package midstream

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// fixture is a pod with three targets, a client, and an attacker on another network. Plain rules
// replace the table of package fwstate: the pod sends new flows to one target.
type fixture struct {
	t                     *testing.T
	client, attacker, pod *lab.NetNS
	targets               []*lab.NetNS
	conn                  *nft.Conn
	kernel                *fwstate.Conn
	links                 map[uint32]plan.LinkAddress // of the targets, by fwmark
	// returning: the pod does not track connections, and targets return packets.
	returning bool
	// late has an element for each answer to "later" that a target may send.
	late chan struct{}
}

const port = 5000

var (
	vips    = [...]netip.Addr{netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")}
	client  = netip.MustParseAddr("10.9.0.1")
	earlier = [...][len(vip.Families)]netip.Addr{
		{netip.MustParseAddr("172.16.2.2"), netip.MustParseAddr("fd16:2::2")},
		{netip.MustParseAddr("172.16.3.2"), netip.MustParseAddr("fd16:3::2")},
	}
	dialer = net.Dialer{Timeout: 5 * time.Second}
)

// asking selects the targets that are asked besides the first one.
type asking string

const (
	second   asking = "the second"
	threeWay asking = "the second and the third"
	everyone asking = "all"
)

// newFixture returns a fixture that asks targets about unknown flows.
func newFixture(t *testing.T, asking asking) *fixture { return newFixtureBy(t, asking, false) }

func newFixtureBy(t *testing.T, asking asking, returning bool) *fixture {
	x := &fixture{t: t, returning: returning, late: make(chan struct{}), links: map[uint32]plan.LinkAddress{}}
	for _, ns := range []**lab.NetNS{&x.client, &x.attacker, &x.pod} {
		*ns = lab.NewNetNS(t, lab.WithoutDAD)
	}
	for key, value := range map[string]string{
		"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1", "net.ipv4.conf.all.rp_filter": "0",
		"net.ipv4.conf.default.rp_filter": "0", "net.netfilter.nf_conntrack_tcp_be_liberal": "1",
	} {
		harness.Must(t, x.pod.Sysctl(key, value))
	}
	attach := func(ns *lab.NetNS, dev, net4, net6 string, host int) {
		harness.Must(t, lab.Veth(ns, "eth0", x.pod, dev))
		harness.Must(t, ns.Addr("eth0", fmt.Sprintf("%s.%d/24", net4, host), fmt.Sprintf("%s::%d/64", net6, host)))
		harness.Must(t, x.pod.Addr(dev, net4+".254/24", net6+"::254/64"))
		ns.Shell(t, fmt.Sprintf("ip route add default via %s.254; ip -6 route add default via %s::254", net4, net6))
	}
	attach(x.client, "ext0", "10.9.0", "fd09", 1)
	attach(x.attacker, "ext1", "10.8.0", "fd08", 1)
	for i := 1; i <= 3; i++ {
		ns, link := lab.NewNetNS(t, lab.WithoutDAD), plan.LinkAddress{2, 0, 0, 0, 1, byte(i)}
		attach(ns, fmt.Sprint("int", i), fmt.Sprint("172.16.", i), fmt.Sprint("fd16:", i), 2)
		harness.Must(t, ns.Addr("lo", "20.0.0.1/32", "2000::1/128"))
		ns.Shell(t, "ip link set eth0 address "+net.HardwareAddr(link[:]).String()+"; ip route replace default via "+
			fmt.Sprintf("172.16.%d.254; ip -6 route replace default via fd16:%d::254", i, i))
		x.pod.Shell(t, fmt.Sprintf(`ip rule add fwmark %d/0xffffff lookup %[1]d
ip -6 rule add fwmark %[1]d/0xffffff lookup %[1]d
ip route add default via 172.16.%[2]d.2 table %[1]d
ip -6 route add default via fd16:%[2]d::2 table %[1]d`, 4999+i, i))
		x.links[uint32(4999+i)] = link
		harness.Must(t, ns.Do(func() error {
			_, err := replypath.Install(t.Context(), replypath.Options{
				Interface: "eth0", Log: slog.New(slog.DiscardHandler),
				Pool: []netip.Prefix{netip.MustParsePrefix("20.0.0.0/24"), netip.MustParsePrefix("2000::/64")},
			})
			return err
		}))
		x.targets = append(x.targets, ns)
		x.serve(ns, i)
	}
	harness.Must(t, x.pod.Do(func() (err error) {
		x.kernel, err = fwstate.Dial(fwstate.Config{})
		return err
	}))
	t.Cleanup(func() { harness.Must(t, x.kernel.Close()) })
	x.conn = x.kernel.NFTables()
	x.apply(x.streams(asking), nil)
	x.forward(5001)
	return x
}

// streams returns the stream of the targets.
func (x *fixture) streams(asking asking) (all Streams) {
	for _, family := range vip.Families {
		stream := Stream{Name: "web", Size: 2, Seed: 1, FWMarks: maps.Clone(x.links), SCTP: true}
		switch asking {
		case everyone:
			stream.Everyone = map[uint32]netip.Addr{}
			for fwmark := range x.links {
				format := []string{"172.16.%d.2", "fd16:%d::2"}[family]
				stream.Everyone[fwmark] = netip.MustParseAddr(fmt.Sprintf(format, fwmark-4999))
			}
		case threeWay:
			stream.Asked[1] = map[uint32]netip.Addr{0: earlier[1][family], 1: earlier[1][family]}
			fallthrough
		case second:
			stream.Asked[0] = map[uint32]netip.Addr{0: earlier[0][family], 1: earlier[0][family]}
		}
		all[family] = []Stream{stream}
	}
	return all
}

// apply writes the tables; known is the content before, nil if unknown.
func (x *fixture) apply(streams Streams, known *Streams) {
	x.t.Helper()
	mode := Mode{Mask: fwstate.Config{}.WithDefaults().FWMarkMask(), Returning: x.returning}
	if _, err := Apply(x.conn, mode, streams, known); err != nil {
		x.t.Fatal(err)
	}
}

// serve answers each line with the number of the target, and "later" when the test says so.
func (x *fixture) serve(ns *lab.NetNS, number int) {
	listener, err := ns.Listen("tcp", fmt.Sprintf(":%d", port))
	harness.Must(x.t, err)
	x.t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			x.t.Cleanup(func() { _ = conn.Close() })
			go func() {
				for lines := bufio.NewScanner(conn); lines.Scan(); {
					if lines.Text() == "later" {
						<-x.late
					}
					fmt.Fprintln(conn, number)
				}
			}()
		}
	}()
}

// forward sends new flows to the target with a fwmark; each known one keeps its target.
func (x *fixture) forward(fwmark uint32) {
	if x.returning {
		x.pod.Shell(x.t, fmt.Sprintf(`nft -f - <<END
table inet pod
delete table inet pod
table inet pod {
 chain raw {
  type filter hook prerouting priority raw;
  ip daddr 20.0.0.1 notrack; ip6 daddr 2000::1 notrack; ip saddr 20.0.0.1 notrack; ip6 saddr 2000::1 notrack
 }
 chain pre {
  type filter hook prerouting priority mangle;
  ip daddr 20.0.0.1 meta mark set %[1]d; ip6 daddr 2000::1 meta mark set %[1]d
 }
}
END`, fwmark))
		return
	}
	x.pod.Shell(x.t, fmt.Sprintf(`nft -f - <<END
table inet pod
delete table inet pod
table inet pod {
 chain known { meta mark set ct mark & 0x007fffff; accept; }
 chain new { meta mark set %[1]d; ct mark set ct mark & 0xff800000 | %[1]d; accept; }
 chain vip { ct mark & 0x007fffff { 5000-5002 } goto known; goto new; }
 chain pre {
  type filter hook prerouting priority mangle;
  ip daddr 20.0.0.1 goto vip
  ip6 daddr 2000::1 goto vip
 }
}
END`, fwmark))
}

// move makes the flows of the pod those of another pod, whose new flows went to the second target:
// this one sends new flows to the first.
func (x *fixture) move() {
	x.forward(5000)
	harness.Must(x.t, x.kernel.FlushConntrack([]uint32{5000, 5001, 5002}))
}

func (x *fixture) dial(family vip.Family) net.Conn {
	x.t.Helper()
	var conn net.Conn
	harness.Must(x.t, x.client.Do(func() (err error) {
		conn, err = dialer.Dial("tcp", netip.AddrPortFrom(vips[family], port).String())
		return err
	}))
	x.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ask returns the number of the target that answers.
func ask(conn net.Conn) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(conn, "?"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(line), err
}

func (x *fixture) counters() Counters {
	counters, err := Read(x.conn)
	harness.Must(x.t, err)
	return counters
}

// A flow that moves here keeps its target; a new one gets the current target.
func TestMovedFlowsKeepTheirTarget(t *testing.T) {
	for _, asking := range []asking{second, threeWay, everyone} {
		x := newFixture(t, asking)
		for _, family := range vip.Families {
			for target := 1; target <= 2 || asking != second && target == 3; target++ {
				t.Run(fmt.Sprintf("%s target %d, %s asked", family, target, asking), func(t *testing.T) {
					want := fmt.Sprint(target)
					x.forward(uint32(4999 + target))
					flow := x.dial(family)
					for range 3 {
						if got, err := ask(flow); got != want || err != nil {
							t.Fatalf("%q, %v", got, err)
						}
						x.move()
					}
					if got, err := ask(flow); got != want || err != nil {
						t.Errorf("after the moves: %q, %v", got, err)
					}
					asked := x.counters().Asked
					if got, err := ask(flow); got != want || err != nil || x.counters().Asked != asked {
						t.Errorf("a decided flow: %q, %v, %+v", got, err, x.counters())
					}
					if got, err := ask(x.dial(family)); got != "1" || err != nil || x.counters().Asked != asked {
						t.Errorf("a new flow: %q, %v, %+v", got, err, x.counters())
					}
				})
			}
		}
	}
}

// The first packet of a flow that moves here may be an answer: connection tracking has an entry then
// that the client did not begin.
func TestMovedFlowsOfTargetsKeepThem(t *testing.T) {
	for _, asking := range []asking{second, threeWay, everyone} {
		x := newFixture(t, asking)
		for _, family := range vip.Families {
			t.Run(fmt.Sprintf("%s, %s asked", family, asking), func(t *testing.T) { movedByTarget(t, x, family) })
		}
	}
}

func movedByTarget(t *testing.T, x *fixture, family vip.Family) {
	x.forward(5001)
	flow := x.dial(family)
	harness.Must(t, flow.SetDeadline(time.Now().Add(20*time.Second)))
	lines := bufio.NewReader(flow)
	for range 3 {
		if _, err := fmt.Fprintln(flow, "later"); err != nil {
			t.Fatal(err)
		}
		await.True(t, "the request to be acknowledged", func() bool {
			server := netip.AddrPortFrom(vips[family], port).String()
			out, err := x.client.Run(t.Context(), "ss", "-Htn", "state", "established", "dst", server)
			fields := strings.Fields(out)
			return err == nil && len(fields) > 2 && fields[1] == "0"
		})
		x.move()
		x.late <- struct{}{}
		if got, err := lines.ReadString('\n'); got != "2\n" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if got, err := ask(flow); got != "2" || err != nil {
		t.Errorf("the client's first request: %q, %v", got, err)
	}
	harness.Must(t, flow.Close())
}

// A flow that is undecided while the set of asked targets changes keeps its target.
func TestUndecidedFlowsSurviveChangeOfAsking(t *testing.T) {
	for _, change := range []struct{ from, to asking }{
		{second, everyone}, {threeWay, everyone}, {everyone, second}, {everyone, threeWay}, {second, threeWay},
	} {
		for _, family := range vip.Families {
			t.Run(fmt.Sprintf("%s, %s to %s", family, change.from, change.to), func(t *testing.T) {
				x := newFixture(t, change.from)
				x.undecided(family, func() {
					before := x.streams(change.from)
					x.apply(x.streams(change.to), &before)
				})
			})
		}
	}
}

// A flow that is undecided while the target of its first packet leaves keeps its own target.
func TestUndecidedFlowsSurviveCurrentTarget(t *testing.T) {
	for _, family := range vip.Families {
		t.Run(family.String(), func(t *testing.T) {
			x := newFixture(t, everyone)
			x.undecided(family, func() {
				before := x.streams(everyone)
				delete(x.links, 5000)
				x.forward(5002)
				harness.Must(t, x.kernel.FlushConntrack([]uint32{5000}))
				x.apply(x.streams(everyone), &before)
			})
		})
	}
}

// undecided moves a flow of the second target to the pod, and changes the pod while the answers of
// that target are lost and another one has denied the flow.
func (x *fixture) undecided(family vip.Family, change func()) {
	x.t.Helper()
	x.forward(5001)
	flow := x.dial(family)
	if got, err := ask(flow); got != "2" || err != nil {
		x.t.Fatalf("%q, %v", got, err)
	}
	x.move()
	x.loseAnswers()
	if _, err := fmt.Fprintln(flow, "?"); err != nil {
		x.t.Fatal(err)
	}
	table := []string{"ip", "ip6"}[family]
	await.True(x.t, "a denial", func() bool {
		return strings.Contains(x.pod.Shell(x.t, "nft list set "+table+" vipgate-lb denier"), "expires")
	})
	change()
	asked := x.counters().Asked
	await.True(x.t, "a retransmission to be asked about", func() bool { return x.counters().Asked > asked })
	x.pod.Shell(x.t, "nft delete table netdev lost")
	harness.Must(x.t, flow.SetDeadline(time.Now().Add(30*time.Second)))
	if got, err := bufio.NewReader(flow).ReadString('\n'); got != "2\n" || err != nil {
		x.t.Errorf("%q, %v; %+v", got, err, x.counters())
	}
}

// loseAnswers drops the packets of the second target until the table netdev lost is deleted.
func (x *fixture) loseAnswers() {
	x.t.Helper()
	x.pod.Shell(x.t, `nft add table netdev lost
nft 'add chain netdev lost in { type filter hook ingress device int2 priority 0; }'
nft add rule netdev lost in tcp sport 5000 drop`)
}

// A half-closed flow, of which this pod sees the FIN first, gets its answer.
func TestMovedFINIsAnswered(t *testing.T) {
	for _, asking := range []asking{second, everyone} {
		t.Run(string(asking), func(t *testing.T) { movedFIN(t, newFixture(t, asking)) })
	}
}

func movedFIN(t *testing.T, x *fixture) {
	flow := x.dial(vip.IPv4)
	if _, err := ask(flow); err != nil {
		t.Fatal(err)
	}
	x.move()
	harness.Must(t, flow.(*net.TCPConn).CloseWrite())
	// The target's end of the flow ends, too, when its scanner does: it closes at the end of the test.
	await.True(t, "the client's FIN to be acknowledged", func() bool {
		out, err := x.client.Run(t.Context(), "ss", "-Htn", "state", "fin-wait-2")
		return err == nil && strings.Contains(out, "20.0.0.1")
	})
}

// A socket that an earlier flow of the same ports left at the current target answers with bare ACKs
// (RFC 5961): data decides.
func TestStaleSocketsDecideNothing(t *testing.T) {
	for _, asking := range []asking{second, everyone} {
		t.Run(string(asking), func(t *testing.T) { staleSockets(t, newFixture(t, asking)) })
	}
}

func staleSockets(t *testing.T, x *fixture) {
	x.forward(5000)
	dialer.LocalAddr = &net.TCPAddr{Port: 45000}
	t.Cleanup(func() { dialer.LocalAddr = nil })
	stale := x.dial(vip.IPv4)
	if got, err := ask(stale); got != "1" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	// The client's RST is lost.
	x.pod.Shell(t, "nft add table ip lost; "+
		"nft add chain ip lost out '{ type filter hook forward priority 0; policy drop; }'")
	harness.Must(t, errors.Join(stale.(*net.TCPConn).SetLinger(0), stale.Close()))
	x.pod.Shell(t, "nft delete table ip lost")
	x.forward(5001)
	harness.Must(t, x.kernel.FlushConntrack([]uint32{5000, 5001, 5002}))
	flow := x.dial(vip.IPv4)
	if got, err := ask(flow); got != "2" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	x.move()
	for range 3 {
		if got, err := ask(flow); got != "2" || err != nil {
			t.Fatalf("after the move: %q, %v", got, err)
		}
	}
	if got := x.counters(); got.Decided == 0 || got.Denied != 0 {
		t.Errorf("%+v", got)
	}
}

// send sends forged packets.
func (x *fixture) send(ns *lab.NetNS, packets ...[]byte) {
	x.t.Helper()
	harness.Must(x.t, ns.Do(func() error {
		socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		for _, packet := range packets {
			err = errors.Join(err, syscall.Sendto(socket, packet, 0, &syscall.SockaddrInet4{Addr: [4]byte(packet[16:])}))
		}
		return errors.Join(err, syscall.Close(socket))
	}))
}

// The client gets the RST of a flow that no target has.
func TestDeadFlowsAreReset(t *testing.T) {
	for asking, copies := range map[asking]uint64{second: 1, threeWay: 2, everyone: 2} {
		t.Run(string(asking), func(t *testing.T) { deadFlows(t, newFixture(t, asking), copies) })
	}
}

func deadFlows(t *testing.T, x *fixture, copies uint64) {
	x.move()
	capture := lab.NewCapture(t, x.client, "eth0")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for number := uint16(40000); number < 40010; number++ {
		x.send(x.client, tcpSegment(netip.AddrPortFrom(client, number), netip.AddrPortFrom(vips[0], port), tcpACK|tcpPSH))
		if err := capture.Wait(ctx, func(p lab.Packet) bool { return !p.Outgoing && p.DstPort == number }); err != nil {
			t.Fatal(err)
		}
	}
	if got := x.counters(); got.Denied != 10 || got.Asked != 10*copies || got.Decided != 0 {
		t.Errorf("%+v", got)
	}
}

// Forged segments from the VIP decide and deny no flow.
func TestForgedAnswersAreIgnored(t *testing.T) {
	for asking, denials := range map[asking]int{second: 1, everyone: 2} {
		t.Run(string(asking), func(t *testing.T) { forgedAnswers(t, newFixture(t, asking), denials) })
	}
}

func forgedAnswers(t *testing.T, x *fixture, denials int) {
	flow := x.dial(vip.IPv4)
	if got, err := ask(flow); got != "2" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	x.move()
	to := flow.LocalAddr().(*net.TCPAddr).AddrPort()
	// The flow is undecided until a target answers: the first target denies it, and the second has no data.
	x.send(x.client, tcpSegment(to, netip.AddrPortFrom(vips[0], port), tcpACK))
	await.True(t, "the flow to be undecided", func() bool {
		return strings.Count(x.pod.Shell(t, "nft list set ip vipgate-lb denier"), to.Addr().String()) == denials
	})
	capture := lab.NewCapture(t, x.pod, "ext1")
	for _, flags := range []byte{tcpRST, tcpRST | tcpACK, tcpPSH | tcpACK, tcpFIN | tcpACK, tcpACK} {
		x.send(x.attacker, tcpSegment(netip.AddrPortFrom(vips[0], port), to, flags))
	}
	await.True(t, "the forged packets to arrive", func() bool {
		return capture.Count(func(p lab.Packet) bool { return !p.Outgoing && p.DstPort == to.Port() }) == 5
	})
	if got := x.counters(); got.Decided != 0 || got.Denied != 0 {
		t.Errorf("%+v", got)
	}
	if out := x.pod.Shell(t, "nft list set ip vipgate-lb denier"); strings.Count(out, to.Addr().String()) != denials {
		t.Error(out)
	}
}

// When the set of undecided flows is full, a flow that moves follows the current target, which
// resets it.
func TestFullSetFailsOpen(t *testing.T) {
	x := newFixture(t, second)
	flow, lucky := x.dial(vip.IPv4), x.dial(vip.IPv4)
	for _, conn := range []net.Conn{flow, lucky} {
		if got, err := ask(conn); got != "2" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
	}
	x.move()
	if got, err := ask(lucky); got != "2" || err != nil {
		t.Fatalf("%q, %v", got, err)
	}
	table := nft.Table{Family: unix.NFPROTO_IPV4, Name: "vipgate-lb"}
	transaction := &nft.Transaction{Table: table}
	var flood []nft.Element
	for i := range uint32(maxUndecided - 1) {
		key := binary.BigEndian.AppendUint32(nil, 0x0b000000+i)
		key = append(append(key, vips[0].AsSlice()...), 0, 1, 0, 0, 0, 2, 0, 0)
		flood = append(flood, nft.Element{Key: key, Timeout: time.Minute})
	}
	transaction.AddElements(undecidedSet, flood)
	harness.Must(t, x.conn.Commit(transaction, nil))
	if got, err := ask(flow); err == nil {
		t.Errorf("the flow was answered by %s", got)
	}
	if x.counters().Full == 0 {
		t.Errorf("%+v", x.counters())
	}
	if got, err := ask(lucky); got != "2" || err != nil {
		t.Errorf("a decided flow: %q, %v", got, err)
	}
}

// When the set of denials is full, a flow that moves still finds its target.
func TestFullDenialsBreakNoFlow(t *testing.T) {
	for _, asking := range []asking{threeWay, everyone} {
		t.Run(string(asking), func(t *testing.T) {
			x := newFixture(t, asking)
			flow := x.dial(vip.IPv4)
			if got, err := ask(flow); got != "2" || err != nil {
				t.Fatalf("%q, %v", got, err)
			}
			for first := uint32(0); first < maxDenials; first += fwstate.MaxElements {
				transaction := &nft.Transaction{Table: nft.Table{Family: unix.NFPROTO_IPV4, Name: plan.TableName}}
				var flood []nft.Element
				for i := first; i < min(first+fwstate.MaxElements, maxDenials); i++ {
					key := binary.BigEndian.AppendUint32(nil, 0x0b000000+i)
					key = append(append(key, vips[0].AsSlice()...), 0, 1, 0, 0, 0, 2, 0, 0)
					flood = append(flood, nft.Element{Key: append(key, 2, 0, 0, 0, 1, 1, 0, 0), Timeout: time.Minute})
				}
				transaction.AddElements(denierSet, flood)
				harness.Must(t, x.conn.Commit(transaction, nil))
			}
			x.move()
			x.loseAnswers()
			if _, err := fmt.Fprintln(flow, "?"); err != nil {
				t.Fatal(err)
			}
			await.True(t, "a retransmission to be asked about", func() bool { return x.counters().Asked >= 4 })
			x.pod.Shell(t, "nft delete table netdev lost")
			harness.Must(t, flow.SetDeadline(time.Now().Add(30*time.Second)))
			if got, err := bufio.NewReader(flow).ReadString('\n'); got != "2\n" || err != nil {
				t.Errorf("%q, %v; %+v", got, err, x.counters())
			}
		})
	}
}

// A flood of forged packets, each of another flow, has bounded copies and state, and changes no
// flow of another client.
func TestFloodIsBounded(t *testing.T) {
	for _, asking := range []asking{second, everyone} {
		t.Run(string(asking), func(t *testing.T) {
			x := newFixture(t, asking)
			flow := x.dial(vip.IPv4)
			if got, err := ask(flow); got != "2" || err != nil {
				t.Fatalf("%q, %v", got, err)
			}
			x.move()
			if got, err := ask(flow); got != "2" || err != nil {
				t.Fatalf("after the move: %q, %v", got, err)
			}
			var flood [][]byte
			for i := range uint32(maxUndecided + 5000) {
				from := netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, 0x0b000000+i)))
				flood = append(flood, tcpSegment(netip.AddrPortFrom(from, 1024), netip.AddrPortFrom(vips[0], port), tcpACK))
			}
			began := time.Now()
			x.send(x.attacker, flood...)
			if got, err := ask(x.dial(vip.IPv4)); got != "1" || err != nil {
				t.Errorf("a new flow: %q, %v", got, err)
			}
			if got, err := ask(flow); got != "2" || err != nil {
				t.Errorf("a decided flow: %q, %v", got, err)
			}
			// The decided flow was asked about, too. After a slow flood there was room for all.
			got, least, limit := x.counters(), uint64(maxUndecided), uint64(len(flood)+1)
			if asking == everyone {
				least, limit = 2*askBurst, 2*(askBurst+askRate*uint64(1+time.Since(began)/time.Second))
			}
			full := got.Full > 0 || time.Since(began) > memory
			if got.Asked > limit || got.Asked < least || !full {
				t.Errorf("%+v, want %d to %d copies", got, least, limit)
			}
			table := nft.Table{Family: unix.NFPROTO_IPV4, Name: plan.TableName}
			for set, limit := range map[string]int{
				undecidedSet: maxUndecided, everyoneMap: maxUndecided, denierSet: maxDenials,
			} {
				count := 0
				_, err := x.conn.Elements(table, set, func(nft.Element) { count++ })
				if err != nil || count > limit {
					t.Errorf("%d elements of %s, at most %d; %v", count, set, limit, err)
				}
			}
		})
	}
}
