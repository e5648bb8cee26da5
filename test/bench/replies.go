package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/test/lab"
)

// Methods to reply that are compared with vipgate's, the kernel state of target.
const (
	replyPlain   = "one return route"
	replyTracked = "one return route, conntrack, one rule"
	replyRules   = "a rule and table per peer"
)

const (
	// replyLink and targetLink are the ends of the wire between trench pods and a target.
	replyLink, targetLink = "int0", "net0"

	replyGoal = "median ≤ 1.25"
)

// replyPool is the prefix of floodVIP; replyClient sends to it through each of the trench pods.
var (
	replyPool   = netip.MustParsePrefix("20.0.0.0/8")
	replyClient = netip.MustParseAddr("10.9.0.1")
)

// replyPath is a target, and one namespace that replaces its client and a number of trench pods,
// each with a separate link address.
type replyPath struct {
	technique string
	peers     int

	pods, target *lab.NetNS
	echo         *packetPath
	flood        *frameSender
	arrived      *arrivals
	ends         []func() error
}

// peerAddress returns the address of a trench pod. The last one is the interface of the namespace.
func (p *replyPath) peerAddress(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{172, 16, 2, byte(p.peers - 1 - i)})
}

// peerMAC returns the link address of a trench pod.
func (p *replyPath) peerMAC(i int) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0, 0, 0, 1, byte(p.peers - 1 - i)}
}

func newReplyPath(ctx context.Context, technique string, peers int) (_ *replyPath, err error) {
	p := &replyPath{technique: technique, peers: peers, echo: &packetPath{technique: technique}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s with %d peers: %w", technique, peers, err), p.close())
		}
	}()
	for _, ns := range []**lab.NetNS{&p.pods, &p.target} {
		if *ns, err = lab.Create(); err != nil {
			return nil, err
		}
		p.ends = append(p.ends, (*ns).Close)
	}
	// The namespace has the addresses of the last peer; the flood forges the link addresses of the
	// rest.
	last := p.peers - 1
	if err := errors.Join(
		lab.Veth(p.pods, replyLink, p.target, targetLink),
		p.pods.Batch("link set "+replyLink+" address "+p.peerMAC(last).String(), "addr add "+replyClient.String()+" dev lo"),
		p.pods.Addr(replyLink, p.peerAddress(last).String()+"/16"), p.target.Addr(targetLink, "172.16.1.1/16"),
		p.pods.Batch("link set "+replyLink+" up",
			"route add "+replyPool.String()+" via 172.16.1.1 src "+replyClient.String()),
		p.target.Batch("link set "+targetLink+" up"),
		nft(ctx, p.pods, "add table netdev sink; add counter netdev sink arrived; "+
			"add chain netdev sink c { type filter hook ingress device "+replyLink+" priority 0; }; "+
			"add rule netdev sink c icmp type echo-reply counter name arrived drop"),
	); err != nil {
		return nil, err
	}
	if err := p.install(ctx); err != nil {
		return nil, err
	}
	if p.arrived, err = openArrivals(p.pods, nftables.TableFamilyNetdev); err != nil {
		return nil, err
	}
	p.ends = append(p.ends, p.arrived.close)
	if err := p.openFlood(); err != nil {
		return nil, err
	}
	if err := p.echo.startEcho(p.target, p.pods); err != nil {
		return nil, err
	}
	return p, p.learn(ctx)
}

// install has the target accept packets to the VIP, and reply.
func (p *replyPath) install(ctx context.Context) error {
	if p.technique == vipgate {
		_, err := p.installState(ctx)
		return err
	}
	lines := []string{"route add local " + replyPool.String() + " dev lo"}
	if p.technique != replyRules {
		lines = append(lines, "route add default via "+p.peerAddress(p.peers-1).String())
		if p.technique == replyTracked {
			// Any rule that matches the conntrack state enables tracking. All other methods have ip
			// rules.
			lines = append(lines, "rule add from 20.0.0.0/8 lookup main")
			if err := nft(ctx, p.target, "add table ip t; add chain ip t c { type filter hook input priority 0; }; "+
				"add rule ip t c ct state invalid drop"); err != nil {
				return err
			}
		}
		return p.target.Batch(lines...)
	}
	const table = 1000
	var marks []string
	for i := range p.peers {
		via, mac := p.peerAddress(i), p.peerMAC(i)
		lines = append(lines,
			fmt.Sprintf("neigh add %s lladdr %s dev %s", via, mac, targetLink),
			fmt.Sprintf("route add default via %s dev %s table %d", via, targetLink, table+i),
			fmt.Sprintf("rule add from %s fwmark %d lookup %d", replyPool, i+1, table+i),
		)
		marks = append(marks, fmt.Sprintf("%s : %d", mac, i+1))
	}
	// The route of a first reply is looked up before the output hook runs.
	lines = append(lines, fmt.Sprintf("rule add from %s priority 32765 lookup %d", replyPool, table))
	return errors.Join(p.target.Batch(lines...), nft(ctx, p.target, "add table ip t; "+
		"add map ip t peers { type ether_addr : mark; elements = { "+strings.Join(marks, ", ")+" }; }; "+
		"add chain ip t in { type filter hook prerouting priority mangle; }; "+
		"add rule ip t in ip daddr 20.0.0.0/8 ct mark set ether saddr map @peers; "+
		"add chain ip t out { type route hook output priority mangle; }; "+
		"add rule ip t out ip saddr 20.0.0.0/8 meta mark set ct mark"))
}

// installState installs the state of target, or reads it.
func (p *replyPath) installState(ctx context.Context) (s replypath.Status, err error) {
	err = p.target.Do(func() error {
		s, err = replypath.Install(ctx, replypath.Options{
			Pool: []netip.Prefix{replyPool}, Interface: targetLink, Log: slog.New(slog.DiscardHandler),
		})
		return err
	})
	return s, err
}

// openFlood prepares ICMP echo requests of many flows, each through one of the trench pods. The
// kernel answers them, so that no application's time is measured.
func (p *replyPath) openFlood() error {
	at, err := interfaceOf(p.pods, replyLink)
	if err != nil {
		return err
	}
	to, err := interfaceOf(p.target, targetLink)
	if err != nil {
		return err
	}
	p.flood = &frameSender{}
	for i := range p.flood.frames {
		payload := p.flood.frame(i, p.peerMAC(i%p.peers), to.HardwareAddr, replyClient, unix.IPPROTO_ICMP)
		payload[0] = 8                                       // echo request
		binary.BigEndian.PutUint16(payload[4:], uint16(i+1)) // identifier
		binary.BigEndian.PutUint16(payload[2:], ^onesSum(payload))
	}
	if err := p.flood.open(p.pods, at.Index); err != nil {
		return err
	}
	p.ends = append(p.ends, p.flood.close)
	return nil
}

// learn sends packets through all peers, so that the target learns them, and verifies that it
// did.
func (p *replyPath) learn(ctx context.Context) error {
	if _, _, err := p.flood.send(floodTime); err != nil || p.technique != vipgate {
		return err
	}
	s, err := p.installState(ctx)
	if err == nil && len(s.Peers) != p.peers {
		err = fmt.Errorf("the target knows %d peers", len(s.Peers))
	}
	return err
}

func (p *replyPath) close() error {
	err := p.echo.close()
	for i := len(p.ends) - 1; i >= 0; i-- {
		err = errors.Join(err, p.ends[i]())
	}
	p.ends = nil
	return err
}

// measureReplies is row 21. All methods are installed at the same time and are measured in turns,
// some milliseconds each.
func measureReplies(ctx context.Context, s *session) (err error) {
	type plan struct {
		technique string
		peers     int
	}
	plans := []plan{
		{replyPlain, 1}, // the baseline of the comparison
		{replyTracked, 1},
		{replyRules, 3},
		{replyRules, 200},
		{vipgate, 1},
		{vipgate, 3},
		{vipgate, 200},
	}
	if s.quick {
		plans = []plan{{replyPlain, 1}, {replyRules, 3}, {vipgate, 3}}
	}
	var paths []*replyPath
	defer func() {
		for _, p := range paths {
			err = errors.Join(err, p.close())
		}
	}()
	for _, x := range plans {
		p, err := newReplyPath(ctx, x.technique, x.peers)
		if err != nil {
			return err
		}
		paths = append(paths, p)
	}
	results := make([]forwardResult, len(paths))
	if err := pinned(func() error {
		return compareReplies(ctx, paths, results, s.repeats(60, 5), 100)
	}); err != nil {
		return err
	}
	for i, p := range paths {
		record := func(what, unit, goal string, samples []float64) {
			s.record(Measurement{
				Row: 21, What: what, Method: p.technique, N: p.peers, Unit: unit, Goal: goal, Samples: samples,
			})
		}
		r, plain := results[i], results[0]
		record("one core's time per request and reply of the kernel", "µs", "", r.costs)
		record("round trip to an application", "µs", "", r.trips)
		if i == 0 {
			continue
		}
		goal := ""
		if p.technique == vipgate {
			goal = replyGoal
		}
		record("time per request and reply ÷ that of one return route", "×", "", beside(r.costs, plain.costs))
		record("round trip ÷ that of one return route", "×", goal, beside(r.medians, plain.medians))
	}
	return nil
}

// compareReplies measures all methods in turns.
func compareReplies(ctx context.Context, paths []*replyPath, results []forwardResult, rounds, trips int) error {
	measure := func(p *replyPath, r *forwardResult) error {
		cost, err := p.flood.measure(floodTime, p.arrived)
		if err != nil {
			return err
		}
		peers := []netip.Addr{floodVIP}
		if _, err := p.echo.client.roundTrips(peers, 2); err != nil {
			return err
		}
		times, err := p.echo.client.roundTrips(peers, trips)
		if err != nil {
			return err
		}
		r.costs, r.trips, r.medians = append(r.costs, cost), append(r.trips, times...), append(r.medians, middle(times))
		return nil
	}
	for round := range rounds {
		for turn := range paths {
			i := (turn + round) % len(paths)
			if err := errors.Join(ctx.Err(), measure(paths[i], &results[i])); err != nil {
				return fmt.Errorf("%s with %d peers: %w", paths[i].technique, paths[i].peers, err)
			}
		}
	}
	return nil
}
