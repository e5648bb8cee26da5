package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	// discardPort is the destination port of a flood. Its packets are counted and dropped on
	// arrival.
	discardPort = 9
	// floodFlows is the number of flows of a flood, which are sent in turn.
	floodFlows = 1024
	// floodBatch is the number of packets per system call.
	floodBatch = 64

	// forwardGoal is ≥ 80 % of the rate, as a ratio of times: 1/0.8.
	forwardGoal = "median ≤ 1.25"
)

// floodVIP is the destination of all packets.
var floodVIP = netip.MustParseAddr("20.0.0.1")

// forwardPath is a client, a pod that forwards with one method to a number of targets, and these
// targets, which share one namespace.
type forwardPath struct {
	kind    string
	targets int

	fixture *planeFixture
	echo    *packetPath
	flood   *frameSender
	arrived *arrivals
	ends    []func() error
}

// newForwardPath creates a path that is ready to be measured.
func newForwardPath(ctx context.Context, way string, targets int) (_ *forwardPath, err error) {
	p := &forwardPath{kind: way, targets: targets}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s to %d targets: %w", way, targets, err), p.close())
		}
	}()
	if p.fixture, err = newPlaneFixture(ctx, targets, oneFamily); err != nil {
		return nil, err
	}
	g := p.fixture
	variant := pathVariants[way]
	if variant.macvlan {
		if err := p.overMacvlan(); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(
		g.Gateway.IP("route", "add", "20.0.0.0/8", "via", lab.PodExternal4.String()),
		g.Backend.IP("route", "add", "local", "20.0.0.0/8", "dev", "lo"),
		g.Backend.IP("route", "add", "default", "via", "172.16.0.1"),
	); err != nil {
		return nil, err
	}
	sink := g.Backend
	switch way {
	case forwardNone:
		// The first namespace that receives the packet drops it: only the cost of sending remains.
		sink = g.Pod
	case forwardRule:
		// Every pod has rules for the frontend's source routing. The first rule adds the cost of rule
		// lookups, even if no packet matches it.
		if err := g.Pod.IP("rule", "add", "fwmark", "0x01000000", "lookup", "4096"); err != nil {
			return nil, err
		}
	case forwardTracked:
		// Any rule that matches the conntrack state enables tracking.
		if err := nft(ctx, g.Pod, "add table ip t; add chain ip t c { type filter hook forward priority 0; }; add "+
			"rule ip t c ct state invalid drop"); err != nil {
			return nil, err
		}
	}
	if variant.frontend {
		if err := p.routeBySource(ctx); err != nil {
			return nil, err
		}
	}
	if variant.vips > 0 {
		if err := g.start(ctx, variant.conntrack, variant.fastPath); err != nil {
			return nil, err
		}
		streams := planeStreams(0, 1, targets, tableSize, oneFamily)
		for _, s := range streams {
			s.VIPs, s.Match = numberedVIPs(variant.vips, oneFamily), matchOf(variant.ports)
		}
		if _, err := g.plane.configure(streams); err != nil {
			return nil, err
		}
		if err := g.plane.waitFastPath(ctx, variant.fastPath); err != nil {
			return nil, err
		}
	}
	if g.plane == nil {
		if err := g.Pod.IP("route", "add", "20.0.0.0/8", "via", planeAddress(0, vip.IPv4).String()); err != nil {
			return nil, err
		}
	}
	if err := nft(ctx, sink, fmt.Sprintf("add table ip sink; add counter ip sink arrived; "+
		"add chain ip sink c { type filter hook prerouting priority raw; }; "+
		"add rule ip sink c udp dport %d counter name arrived drop", discardPort)); err != nil {
		return nil, err
	}
	if p.arrived, err = openArrivals(sink, nftables.TableFamilyIPv4); err != nil {
		return nil, err
	}
	p.ends = append(p.ends, p.arrived.close)
	if p.flood, err = newFrameSender(g.Lab); err != nil {
		return nil, err
	}
	p.ends = append(p.ends, p.flood.close)
	p.echo = &packetPath{technique: way}
	return p, p.echo.startEcho(g.Backend, g.Gateway)
}

// matchOf returns n ports, which include the ports of the flood and of the round trips; none for
// 0.
func matchOf(n int) (ports []plan.Port) {
	for i := range n {
		ports = append(ports, plan.Port{Protocol: unix.IPPROTO_UDP, Number: uint16(discardPort + i)})
	}
	if n > 0 {
		ports[n-1].Number = echoPort
	}
	return ports
}

func nft(ctx context.Context, ns *lab.NetNS, commands string) error {
	_, err := ns.Run(ctx, "nft", commands)
	return err
}

func (p *forwardPath) close() error {
	var errs []error
	if p.echo != nil {
		errs = append(errs, p.echo.close())
	}
	for _, end := range p.ends {
		errs = append(errs, end())
	}
	p.ends = nil
	if p.fixture != nil {
		errs = append(errs, p.fixture.close())
		p.fixture = nil
	}
	return errors.Join(errs...)
}

// arrivals is the counter "arrived" in a table "sink", of the packets of floods.
type arrivals struct {
	conn   *nftables.Conn
	family nftables.TableFamily
}

func openArrivals(ns *lab.NetNS, f nftables.TableFamily) (*arrivals, error) {
	a := &arrivals{family: f}
	err := ns.Do(func() (err error) { a.conn, err = nftables.New(nftables.AsLasting()); return err })
	if err != nil {
		return nil, fmt.Errorf("counter: %w", err)
	}
	return a, nil
}

func (a *arrivals) close() error { return a.conn.CloseLasting() }

// count returns the number of flood packets that have arrived.
func (a *arrivals) count() (uint64, error) {
	object, err := a.conn.GetObject(
		&nftables.CounterObj{Table: &nftables.Table{Name: "sink", Family: a.family}, Name: "arrived"},
	)
	if err != nil {
		return 0, fmt.Errorf("counter: %w", err)
	}
	counter, ok := object.(*nftables.CounterObj)
	if !ok {
		return 0, fmt.Errorf("counter: the kernel answered with %T", object)
	}
	return counter.Packets, nil
}

// measure sends packets for d and returns the time for each that arrived, in µs.
func (f *frameSender) measure(d time.Duration, a *arrivals) (float64, error) {
	// Warm up neighbor entries, caches and tracked connections.
	if _, _, err := f.send(time.Millisecond); err != nil {
		return 0, err
	}
	before, err := a.count()
	if err != nil {
		return 0, err
	}
	sent, took, err := f.send(d)
	if err != nil {
		return 0, err
	}
	after, err := a.count()
	if err != nil {
		return 0, err
	}
	arrived := after - before
	if 100*arrived < 99*sent {
		return 0, fmt.Errorf("of %d packets %d arrived", sent, arrived)
	}
	return microseconds(took) / float64(arrived), nil
}

// frameSender sends small packets of many flows on a packet socket, without the cost of the
// kernel's UDP and IP layers.
type frameSender struct {
	socket   int
	frames   [floodFlows][60]byte
	vectors  [floodFlows]unix.Iovec
	messages [floodFlows]multipleMessage
	// sources is the next source address of new flows; 0 sends packets of the same flows. renewed is
	// its value after the last flood of new flows.
	sources, renewed uint32
}

// multipleMessage is struct mmsghdr of sendmmsg(2).
type multipleMessage struct {
	header unix.Msghdr
	length uint32
}

// newFrameSender returns a sender of UDP packets from a lab's gateway to floodVIP.
func newFrameSender(l *lab.Lab) (*frameSender, error) {
	from, err := interfaceOf(l.Gateway, "trench0")
	if err != nil {
		return nil, err
	}
	to, err := interfaceOf(l.Pod, lab.External)
	if err != nil {
		return nil, err
	}
	f := &frameSender{}
	for i := range f.frames {
		payload := f.frame(i, from.HardwareAddr, to.HardwareAddr, lab.GatewayA4, unix.IPPROTO_UDP)
		binary.BigEndian.PutUint16(payload, uint16(10_000+i))
		binary.BigEndian.PutUint16(payload[2:], discardPort)
		binary.BigEndian.PutUint16(payload[4:], uint16(len(payload))) // checksum 0: not computed
	}
	return f, f.open(l.Gateway, from.Index)
}

// frame begins a frame to floodVIP and returns the part after its IP header.
func (f *frameSender) frame(i int, from, to net.HardwareAddr, source netip.Addr, protocol byte) (payload []byte) {
	frame := f.frames[i][:]
	copy(frame, to)
	copy(frame[6:], from)
	binary.BigEndian.PutUint16(frame[12:], unix.ETH_P_IP)
	header := frame[14:34]
	header[0], header[8], header[9] = 0x45, 64, protocol
	binary.BigEndian.PutUint16(header[2:], uint16(len(frame)-14))
	copy(header[12:], source.AsSlice())
	copy(header[16:], floodVIP.AsSlice())
	binary.BigEndian.PutUint16(header[10:], ^onesSum(header))
	return frame[34:]
}

// open opens the socket, on an interface.
func (f *frameSender) open(ns *lab.NetNS, link int) error {
	for i := range f.frames {
		f.vectors[i].Base = &f.frames[i][0]
		f.vectors[i].SetLen(len(f.frames[i]))
		f.messages[i].header.Iov = &f.vectors[i]
		f.messages[i].header.SetIovlen(1)
	}
	err := ns.Do(func() (err error) {
		f.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("socket of a flood: %w", err)
	}
	if err := errors.Join(
		unix.SetsockoptInt(f.socket, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1),
		unix.Bind(f.socket, &unix.SockaddrLinklayer{Ifindex: link}),
	); err != nil {
		return errors.Join(fmt.Errorf("socket of a flood: %w", err), unix.Close(f.socket))
	}
	return nil
}

// interfaceOf returns an interface of a namespace.
func interfaceOf(ns *lab.NetNS, name string) (i *net.Interface, err error) {
	err = ns.Do(func() (err error) { i, err = net.InterfaceByName(name); return err })
	return i, err
}

// onesSum returns the ones' complement sum of RFC 1071.
func onesSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

func (f *frameSender) close() error { return unix.Close(f.socket) }

// send sends packets of all flows in turn for at least d. A veth delivers a packet within the
// call that sends it, so no queue fills up.
func (f *frameSender) send(d time.Duration) (packets uint64, took time.Duration, err error) {
	began := time.Now()
	for next := 0; took < d; next = (next + floodBatch) % floodFlows {
		if f.sources > 0 {
			f.renew(next)
		}
		n, _, errno := unix.Syscall6(
			unix.SYS_SENDMMSG, uintptr(f.socket), uintptr(unsafe.Pointer(&f.messages[next])), floodBatch, 0, 0, 0,
		)
		if errno != 0 && !errors.Is(errno, unix.EINTR) {
			return 0, 0, fmt.Errorf("flood: %w", errno)
		}
		if errno == 0 {
			packets += uint64(n)
		}
		took = time.Since(began)
	}
	return packets, took, nil
}

// forwardResult holds the measurements of one forwarding method, in µs.
type forwardResult struct {
	costs   []float64 // time per packet in each round
	firsts  []float64 // the same of first packets of flows
	trips   []float64 // every round trip
	medians []float64 // of the round trips of each round
}

// measureForwarding is row 18. All methods are installed at the same time and are measured in
// turns, some milliseconds each.
func measureForwarding(ctx context.Context, s *session) (err error) {
	var paths []*forwardPath
	defer func() {
		for _, p := range paths {
			err = errors.Join(err, p.close())
		}
	}()
	for _, x := range forwardPlans(s.quick) {
		p, err := newForwardPath(ctx, x.method, x.targets)
		if err != nil {
			return err
		}
		paths = append(paths, p)
	}
	var results []forwardResult
	if err := pinned(func() (err error) {
		results, err = compareForwarding(ctx, paths, s.repeats(60, 5), 100)
		return err
	}); err != nil {
		return err
	}
	recordForwarding(s, paths, results)
	return nil
}

// compareForwarding measures all methods in turns.
func compareForwarding(ctx context.Context, paths []*forwardPath, rounds, trips int) ([]forwardResult, error) {
	results := make([]forwardResult, len(paths))
	for round := range rounds {
		for turn := range paths {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			i := (turn + round) % len(paths)
			p, r := paths[i], &results[i]
			cost, err := p.flood.measure(floodTime, p.arrived)
			if err != nil {
				return nil, fmt.Errorf("%s to %d targets: %w", p.kind, p.targets, err)
			}
			r.costs = append(r.costs, cost)
			if cost, err = p.flood.measureFirst(p.arrived); err != nil {
				return nil, fmt.Errorf("%s to %d targets, new flows: %w", p.kind, p.targets, err)
			}
			r.firsts = append(r.firsts, cost)
			if p.kind == forwardNone {
				// Its plain route would suffice, and is measured as another method.
				continue
			}
			peers := []netip.Addr{floodVIP}
			if _, err := p.echo.client.roundTrips(peers, 2); err != nil {
				return nil, fmt.Errorf("%s to %d targets: %w", p.kind, p.targets, err)
			}
			times, err := p.echo.client.roundTrips(peers, trips)
			if err != nil {
				return nil, fmt.Errorf("%s to %d targets: %w", p.kind, p.targets, err)
			}
			r.trips = append(r.trips, times...)
			r.medians = append(r.medians, middle(times))
		}
	}
	return results, nil
}

// recordForwarding keeps the results. The first way is plain forwarding, the second
// one sends only, and the third one has a rule.
func recordForwarding(s *session, paths []*forwardPath, results []forwardResult) {
	record := func(what string, p *forwardPath, unit, goal string, samples []float64) {
		s.record(Measurement{
			Row: 18, What: what, Method: p.kind, N: p.targets, Unit: unit, Goal: goal,
			Samples: samples,
		})
	}
	var rates, shares []string
	for i, p := range paths {
		record("one core's time per packet", p, "µs", "", results[i].costs)
		if len(results[i].trips) > 0 {
			record("round trip", p, "µs", "", results[i].trips)
		}
		rates = append(rates, fmt.Sprintf("%s to %d: %.0f/s", p.kind, p.targets, 1e6/middle(results[i].costs)))
	}
	plain, alone, rule := results[0], results[1], results[2]
	base := func(p *forwardPath) forwardResult {
		if !pathVariants[p.kind].macvlan {
			return plain
		}
		return results[slices.IndexFunc(paths, func(q *forwardPath) bool { return q.kind == forwardMacvlan })]
	}
	for i, p := range paths[2:] {
		if p.kind == forwardMacvlan {
			continue // the baseline of the others with macvlans
		}
		r, plain, goal := results[i+2], base(p), ""
		if hasForwardGoal(p.kind) && p.targets == 10 {
			goal = forwardGoal
			record("time per packet ÷ that of plain forwarding with one ip rule", p, "×", "",
				beside(r.costs, rule.costs))
		}
		record(forwardRatio, p, "×", goal, beside(r.costs, plain.costs))
		record("round trip ÷ that of plain forwarding", p, "×", "", beside(r.medians, plain.medians))
		record("time per first packet of a flow ÷ that of plain forwarding", p, "×", "", beside(r.firsts, plain.firsts))
		share := (middle(r.costs) - middle(alone.costs)) / (middle(plain.costs) - middle(alone.costs))
		shares = append(shares, fmt.Sprintf("%s to %d: %.2f ×", p.kind, p.targets, share))
	}
	for i, p := range paths {
		j := slices.IndexFunc(paths, func(q *forwardPath) bool {
			return q.kind == withoutMatch[p.kind] && q.targets == p.targets
		})
		if j >= 0 {
			record("time per packet ÷ that without a match", p, "×", "", beside(results[i].costs, results[j].costs))
		}
	}
	s.note(18, "packets in a second on one core, which also plays client and targets: %s", strings.Join(rates, ", "))
	s.note(18, "time per packet ÷ that of plain forwarding, each without the sending, by medians: %s",
		strings.Join(shares, ", "))
}
