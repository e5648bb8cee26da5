package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	echoPort = 7000
	// inFlight is the number of packets in flight in a flood.
	inFlight = 32
	// echoTimeout bounds the wait for one packet.
	echoTimeout = time.Second
	// floodTime is the duration of a flood: short, so that noise affects all paths alike.
	floodTime = 30 * time.Millisecond
	// maxPeers is the number of VIPs with traffic, spread evenly over all.
	maxPeers = 16
)

// sourceNone is the path without source routing.
const sourceNone = "no VIP at all"

// packetPath is a pod's namespace between a gateway's and a target's, with source routing for a
// number of VIPs by one technique.
type packetPath struct {
	technique string
	vips      int
	load      time.Duration // how long the source routing took to load

	lab     *lab.Lab
	client  *echoClient
	cleanup []func() error
}

// Kinds of traffic: packets that a target sends from a VIP, and packets that it sends from its
// primary address.
var packetKinds = []struct {
	name  string
	peers func(vips int) []netip.Addr
}{
	{"VIP traffic", peersOf},
	{"other traffic", func(int) []netip.Addr { return []netip.Addr{lab.Target1v4} }},
}

// peersOf returns the VIPs among n that have traffic. Without a VIP it is the first address,
// which then has no source routing.
func peersOf(n int) []netip.Addr {
	vips := numberedVIPs(max(n, 1), oneFamily)
	count := min(len(vips), maxPeers)
	peers := make([]netip.Addr, count)
	for i := range peers {
		peers[i] = vips[i*len(vips)/count].Prefix().Addr()
	}
	return peers
}

func newPacketPath(ctx context.Context, technique string, vips int) (_ *packetPath, err error) {
	p := &packetPath{technique: technique, vips: vips}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("packet path by %s for %d VIPs: %w", technique, vips, err), p.close())
		}
	}()
	if p.lab, err = lab.New(); err != nil {
		return nil, err
	}
	gateway, pod, target := lab.GatewayA4.String(), lab.PodExternal4.String(), lab.Target1v4.String()
	// These routes replace the gateway's BGP routes and the load balancer's data plane.
	if err := errors.Join(
		p.lab.Gateway.IP("route", "add", "172.16.0.0/16", "via", pod),
		p.lab.Gateway.IP("route", "add", "20.0.0.0/8", "via", pod),
		p.lab.Pod.IP("route", "add", "20.0.0.0/8", "via", target),
		p.lab.Pod.IP("route", "add", "default", "via", gateway, "table", "4096"),
		p.lab.Backend.IP("route", "add", "local", "20.0.0.0/8", "dev", "lo"),
		p.lab.Backend.IP("route", "add", "default", "via", "172.16.0.1"),
	); err != nil {
		return nil, err
	}
	began := time.Now()
	switch technique {
	case vipgate:
		err = p.routeBySet(ctx)
	case reference:
		err = p.routeByRules(ctx)
	}
	if err != nil {
		return nil, err
	}
	p.load = time.Since(began)
	return p, p.startEcho(p.lab.Backend, p.lab.Gateway)
}

// routeBySet runs the frontend's own source routing.
func (p *packetPath) routeBySet(ctx context.Context) error {
	r := kernel.New(kernel.Options{Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- p.lab.Pod.Do(func() error { return r.Run(ctx) }) }()
	p.cleanup = append(p.cleanup, func() error {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	})
	r.Configure(numberedVIPs(p.vips, oneFamily))
	limit, stop := context.WithTimeout(ctx, waitTimeout)
	defer stop()
	for {
		c, changed := r.Confirmed().Get()
		if len(c.VIPs) == p.vips {
			return nil
		}
		select {
		case <-changed:
		case <-limit.Done():
			return fmt.Errorf("%d of %d VIPs confirmed in the kernel: %w", len(c.VIPs), p.vips,
				errors.Join(c.Err, limit.Err()))
		}
	}
}

// routeByRules loads the field's technique: for every VIP a rule to the gateways' table and a
// rule to a blackhole.
func (p *packetPath) routeByRules(ctx context.Context) error {
	var batch bytes.Buffer
	fmt.Fprintln(&batch, "route add blackhole default table 4097")
	for _, v := range numberedVIPs(p.vips, oneFamily) {
		fmt.Fprintf(&batch, "rule add from %s priority 100 table 4096\n", v)
		fmt.Fprintf(&batch, "rule add from %s priority 101 table 4097\n", v)
	}
	path := filepath.Join(p.lab.Dir, "rules")
	if err := os.WriteFile(path, batch.Bytes(), 0o600); err != nil {
		return fmt.Errorf("ip rules: %w", err)
	}
	_, err := p.lab.Pod.Run(ctx, "ip", "-batch", path)
	return err
}

// startEcho starts the target, which sends every packet back from its destination address, and
// opens the client's socket.
func (p *packetPath) startEcho(at, from *lab.NetNS) error {
	var server int
	if err := at.Do(func() (err error) { server, err = udpSocket(echoPort); return err }); err != nil {
		return fmt.Errorf("echo server: %w", err)
	}
	if err := unix.SetsockoptInt(server, unix.IPPROTO_IP, unix.IP_PKTINFO, 1); err != nil {
		return errors.Join(fmt.Errorf("echo server: %w", err), unix.Close(server))
	}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() { echo(server, stop) })
	p.cleanup = append(p.cleanup, func() error { close(stop); wg.Wait(); return unix.Close(server) })

	var client int
	if err := from.Do(func() (err error) { client, err = udpSocket(0); return err }); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	p.cleanup = append(p.cleanup, func() error { return unix.Close(client) })
	p.client = &echoClient{socket: client}
	return nil
}

func (p *packetPath) close() error {
	var errs []error
	for _, f := range slices.Backward(p.cleanup) {
		errs = append(errs, f())
	}
	p.cleanup = nil
	if p.lab != nil {
		errs = append(errs, p.lab.Close())
	}
	return errors.Join(errs...)
}

// udpSocket opens a blocking socket: Go's poller would add to the measured times.
func udpSocket(port int) (int, error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	timeout := unix.NsecToTimeval(echoTimeout.Nanoseconds())
	if err := errors.Join(
		unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.Bind(s, &unix.SockaddrInet4{Port: port}),
	); err != nil {
		return 0, errors.Join(err, unix.Close(s))
	}
	return s, nil
}

// pin locks the calling goroutine to a thread, and the thread to one processor. All ends of all
// paths share it: a wake-up on another processor costs more than the whole path, and depends on
// the scheduler.
func pin() error {
	runtime.LockOSThread()
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return fmt.Errorf("processors of this thread: %w", err)
	}
	var one unix.CPUSet
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			one.Zero()
			one.Set(i)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("pin a thread to a processor: %w", err)
	}
	return nil
}

// pinned runs a function in a goroutine that pin keeps on one processor.
func pinned(f func() error) error {
	ended := make(chan error, 1)
	go func() {
		err := pin()
		if err == nil {
			err = f()
		}
		ended <- err
	}()
	return <-ended
}

// echo answers until stop is closed; it checks stop whenever nothing came for echoTimeout.
func echo(socket int, stop <-chan struct{}) {
	if err := pin(); err != nil {
		return // the client reports the missing packets
	}
	packet, control := make([]byte, 64), make([]byte, unix.CmsgSpace(unix.SizeofInet4Pktinfo))
	for {
		n, oobn, _, from, err := unix.Recvmsg(socket, packet, control, 0)
		if err != nil || oobn < len(control) {
			select {
			case <-stop:
				return
			default:
				continue
			}
		}
		// The reply's source is the packet's destination address; any interface may send it.
		(*unix.Inet4Pktinfo)(unsafe.Pointer(&control[unix.CmsgLen(0)])).Ifindex = 0
		// The client detects a lost reply.
		_ = unix.Sendmsg(socket, packet[:n], control[:oobn], from, 0)
	}
}

// echoClient sends packets and waits for the replies.
type echoClient struct {
	socket int
	packet [16]byte
}

func (c *echoClient) send(to netip.Addr) error {
	if err := unix.Sendto(c.socket, c.packet[:], 0, &unix.SockaddrInet4{Port: echoPort, Addr: to.As4()}); err != nil {
		return fmt.Errorf("send to %s: %w", to, err)
	}
	return nil
}

func (c *echoClient) receive() error {
	for {
		_, _, err := unix.Recvfrom(c.socket, c.packet[:], 0)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EINTR): // a signal of Go's scheduler
			return fmt.Errorf("no packet came back: %w", err)
		}
	}
}

// roundTrips returns the times of n round trips, one after the other, in µs.
func (c *echoClient) roundTrips(peers []netip.Addr, n int) ([]float64, error) {
	times := make([]float64, n)
	for i := range times {
		began := time.Now()
		if err := errors.Join(c.send(peers[i%len(peers)]), c.receive()); err != nil {
			return nil, err
		}
		times[i] = microseconds(time.Since(began))
	}
	return times, nil
}

// flood keeps inFlight packets in flight for d and returns the time per packet in µs, where each
// direction counts as a packet.
func (c *echoClient) flood(peers []netip.Addr, d time.Duration) (float64, error) {
	packets, began := 0, time.Now()
	for time.Since(began) < d {
		for i := range inFlight {
			if err := c.send(peers[i%len(peers)]); err != nil {
				return 0, err
			}
		}
		for range inFlight {
			if err := c.receive(); err != nil {
				return 0, err
			}
		}
		packets += 2 * inFlight
	}
	return microseconds(time.Since(began)) / float64(packets), nil
}

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// measurePackets is row 13. All paths exist at the same time and are measured in turns, some
// milliseconds each.
func measurePackets(ctx context.Context, s *session) (err error) {
	type plan struct {
		technique string
		vips      int
	}
	plans := []plan{
		{sourceNone, 0},
		{vipgate, 1},
		{vipgate, 1000},
		{vipgate, 10_000},
		{reference, 1},
		{reference, 1000},
		{reference, 10_000},
	}
	rounds, trips := s.repeats(60, 5), 100
	if s.quick {
		// Loading two rules for each of 10 000 VIPs takes longer than the rest of the row.
		plans = []plan{{sourceNone, 0}, {vipgate, 1}, {vipgate, 10_000}, {reference, 1000}}
		trips = 50
	}
	var paths []*packetPath
	defer func() {
		for _, p := range paths {
			err = errors.Join(err, p.close())
		}
	}()
	for _, x := range plans {
		p, err := newPacketPath(ctx, x.technique, x.vips)
		if err != nil {
			return err
		}
		paths = append(paths, p)
	}

	var results [][]packetResult
	if err := pinned(func() (err error) {
		results, err = comparePaths(ctx, paths, rounds, trips)
		return err
	}); err != nil {
		return err
	}
	recordPackets(s, paths, results)
	return nil
}

// recordPackets keeps the results of all paths, the first of which has no VIP.
func recordPackets(s *session, paths []*packetPath, results [][]packetResult) {
	for k, kind := range packetKinds {
		var rates []string
		for i, p := range paths {
			r := results[k][i]
			s.record(Measurement{
				Row: 13, What: kind.name + ": round trip", Method: p.technique, N: p.vips, Unit: "µs",
				Samples: r.trips,
			})
			s.record(Measurement{
				Row: 13, What: kind.name + ": one core's time per packet", Method: p.technique,
				N: p.vips, Unit: "µs", Samples: r.costs,
			})
			rates = append(rates, fmt.Sprintf("%s %d VIPs %.0f/s", p.technique, p.vips, 1e6/middle(r.costs)))
		}
		base := results[k][0]
		for i, p := range paths {
			if p.technique != vipgate {
				continue
			}
			r := results[k][i]
			s.record(Measurement{
				Row: 13, What: kind.name + ": round trip ÷ that without any VIP", Method: vipgate,
				N: p.vips, Unit: "×", Samples: beside(r.medians, base.medians),
			})
			s.record(Measurement{
				Row: 13, What: kind.name + ": time per packet ÷ that without any VIP", Method: vipgate,
				N: p.vips, Unit: "×", Samples: beside(r.costs, base.costs),
			})
		}
		s.note(13, "%s, packets in a second on one core, which also plays gateway and target: %s", kind.name,
			strings.Join(rates, ", "))
	}
	for _, p := range paths[1:] {
		s.record(Measurement{
			Row: 13, What: "loading the source routing", Method: p.technique, N: p.vips, Unit: "ms",
			Samples: []float64{milliseconds(p.load)},
		})
	}
}

// comparePaths measures all paths in turns and returns the results by kind of
// traffic and path.
func comparePaths(ctx context.Context, paths []*packetPath, rounds, trips int) ([][]packetResult, error) {
	results := make([][]packetResult, len(packetKinds))
	for k := range results {
		results[k] = make([]packetResult, len(paths))
	}
	for round := range rounds {
		for turn := range paths {
			i := (turn + round) % len(paths)
			for k, kind := range packetKinds {
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				if err := results[k][i].measure(paths[i].client, kind.peers(paths[i].vips), trips); err != nil {
					return nil, fmt.Errorf("%s by %s for %d VIPs: %w", kind.name, paths[i].technique, paths[i].vips,
						err)
				}
			}
		}
	}
	return results, nil
}

// packetResult holds the measurements of one kind of traffic on one path, in µs.
type packetResult struct {
	trips   []float64 // every round trip
	medians []float64 // of the round trips of each round
	costs   []float64 // time per packet in each round, with inFlight under way
}

func (r *packetResult) measure(c *echoClient, peers []netip.Addr, trips int) error {
	// Warm up: expired neighbor entries and cold caches must not be measured.
	if _, err := c.roundTrips(peers, 2*len(peers)); err != nil {
		return err
	}
	times, err := c.roundTrips(peers, trips)
	if err != nil {
		return err
	}
	cost, err := c.flood(peers, floodTime)
	if err != nil {
		return err
	}
	r.trips = append(r.trips, times...)
	r.medians = append(r.medians, middle(times))
	r.costs = append(r.costs, cost)
	return nil
}

// beside divides the values of each round by the values of the same round without any VIP, so
// that temporary noise affects both.
func beside(values, base []float64) []float64 {
	out := make([]float64, len(values))
	for i := range out {
		out[i] = values[i] / base[i]
	}
	return out
}

// middle returns the median, without changing values.
func middle(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted)%2 == 1 {
		return sorted[len(sorted)/2]
	}
	return (sorted[len(sorted)/2-1] + sorted[len(sorted)/2]) / 2
}
