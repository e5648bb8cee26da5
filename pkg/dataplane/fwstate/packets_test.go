package fwstate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	estateSize = 101
	estateSeed = 7
	estatePort = 7000
)

var (
	estateVIPs   = [...]netip.Addr{netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")}
	estateClient = [...]netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")}
)

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func TestFlowsFollowTable(t *testing.T) {
	eachMode(t, 1, func(t *testing.T, x *topology, _ Conntrack) {
		for _, family := range vip.Families {
			seen := map[string]int{}
			for port := uint16(20000); port < 20040; port++ {
				got := x.ask(t, family, port, 10)
				seen[got]++
				if want := x.expected(family, unix.IPPROTO_UDP, port); got != want {
					t.Errorf("%s UDP port %d went to %s, not to %s", family, port, got, want)
				}
			}
			for port := uint16(21000); port < 21010; port++ {
				c, _, got := x.dial(t, family, port)
				must(t, c.Close())
				if want := x.expected(family, unix.IPPROTO_TCP, port); got != want {
					t.Errorf("%s TCP port %d went to %s, not to %s", family, port, got, want)
				}
			}
			if len(seen) != 3 {
				t.Errorf("%s: all flows went to %v", family, seen)
			}
			for port := uint16(22000); port < 22012; port++ {
				got := x.ask(t, family, port, 4000) // fragments
				if want := x.expected(family, unix.IPPROTO_UDP, port); got != want {
					t.Errorf("%s port %d: 4 000 bytes went to %s, not to %s", family, port, got, want)
				}
			}
		}
		// An echo request has no ports.
		for _, family := range vip.Families {
			x.ping(t, family)
		}
	})
}

func TestPathMTUDiscoveryThroughAnyPod(t *testing.T) {
	eachMode(t, 2, func(t *testing.T, x *topology, _ Conntrack) {
		// The client has not learned the MTU of its link.
		x.router.Shell(t, "ip link set client mtu 1300")
		for name, pod := range map[string]int{"the pod of the flow": 0, "a pod that never saw the flow": 1} {
			t.Run(name, func(t *testing.T) {
				x.ownThrough(t, pod)
				for _, family := range vip.Families {
					for port := uint16(23000 + 10*pod); port < uint16(23004+10*pod); port++ {
						c, r, name := x.dial(t, family, port)
						_, err := fmt.Fprintln(c, 200_000)
						must(t, err)
						if n, err := io.CopyN(io.Discard, r, 200_000); err != nil {
							t.Errorf("%s from %s: %d bytes came over a path with a small MTU: %v", family, name, n, err)
						}
					}
				}
				for _, g := range x.targets {
					// Discard the learned path MTU before the next part.
					g.ns.Shell(t, "ip route flush cache; ip -6 route flush cache")
				}
			})
		}
	})
}

func TestFlowsSurviveTableChange(t *testing.T) {
	eachMode(t, 1, func(t *testing.T, x *topology, mode Conntrack) {
		before := map[vip.Family]map[uint16]string{}
		for _, family := range vip.Families {
			before[family] = map[uint16]string{}
			for port := uint16(24000); port < 24020; port++ {
				before[family][port] = x.ask(t, family, port, 10)
			}
		}
		f := x.fabrics[0]
		now, err := f.ReadStream("web")
		must(t, err)
		want := x.stream
		want.Tables = bothFamilies(filled(estateSize, 5000))
		must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: want, Observed: now}}}))
		x.refresh(t)
		for _, family := range vip.Families {
			for port, name := range before[family] {
				if mode == ConntrackOff {
					name = "t0"
				}
				if got := x.ask(t, family, port, 10); got != name {
					t.Errorf("%s port %d went to %s, not to %s", family, port, got, name)
				}
			}
			for port := uint16(24100); port < 24110; port++ {
				if got := x.ask(t, family, port, 10); got != "t0" {
					t.Errorf("a new %s flow went to %s", family, got)
				}
			}
		}
		if mode == ConntrackOff {
			return
		}
		// A target outside the live map loses its flows, and connection tracking has no entry with a
		// removed fwmark.
		gone := x.targets[1].slot
		gone.Flows = [len(vip.Families)]bool{}
		must(t, f.Write(plan.Change{Targets: []plan.KernelTarget{gone}}))
		must(t, f.FlushConntrack([]uint32{5001}))
		if out := x.pods[0].Shell(t, "cat /proc/net/nf_conntrack 2>/dev/null || true"); strings.Contains(out, "mark=5001 ") {
			t.Errorf("connections to a target that is gone:\n%s", out)
		} else if mode == ConntrackOn && !strings.Contains(out, "mark=5002 ") {
			t.Errorf("no connections to a kept target:\n%s", out)
		}
		for _, family := range vip.Families {
			for port, name := range before[family] {
				if name == "t1" {
					name = "t0"
				}
				if got := x.ask(t, family, port, 10); got != name {
					t.Errorf("after a target went %s port %d went to %s, not to %s", family, port, got, name)
				}
			}
		}
	})
}

func TestPacketsWithoutRouteAreDropped(t *testing.T) {
	x := newTopology(t, 1, 2, ConntrackOn)
	wire := lab.NewCapture(t, x.pods[0], "ext")
	ports := map[vip.Family]uint16{}
	for _, family := range vip.Families {
		for port := uint16(25000); ports[family] == 0; port++ {
			if x.expected(family, unix.IPPROTO_UDP, port) == "t1" {
				ports[family] = port
			}
		}
		x.ask(t, family, ports[family], 10)
	}
	for name, commands := range map[string][2]string{
		"route deleted": {
			"ip route del default via 172.16.0.2 table 5001; ip -6 route del default via fd16::2 table 5001",
			"",
		},
		"link down": {"ip link set int0 down", "ip link set int0 up; ip addr replace fd16::200/64 dev int0 nodad"},
	} {
		t.Run(name, func(t *testing.T) {
			x.pods[0].Shell(t, commands[0])
			for _, family := range vip.Families {
				hop, err := x.fabrics[0].ResolveNextHop(5001, family)
				if err != nil || hop.IsValid() {
					t.Errorf("the %s way leads to %s, %v", family, hop, err)
				}
				must(t, x.client.Do(func() error {
					c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(estateClient[family], ports[family])),
						net.UDPAddrFromAddrPort(netip.AddrPortFrom(estateVIPs[family], estatePort)))
					if err != nil {
						return err
					}
					_, err = c.Write([]byte("into the dark"))
					return errors.Join(err, c.Close())
				}))
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				must(t, wire.Wait(ctx, func(p lab.Packet) bool {
					return !p.Outgoing && p.Dst == estateVIPs[family] && p.SrcPort == ports[family]
				}))
				cancel()
			}
			// Each request was answered before the next one arrived.
			x.pods[0].Shell(t, "true; "+commands[1])
			for _, s := range x.slots() {
				for n, err := range x.fabrics[0].AddRoutes([]plan.KernelTarget{s}, true) {
					t.Error(n, err)
				}
			}
			for _, family := range vip.Families {
				x.ask(t, family, ports[family], 10)
			}
			if n := wire.Count(func(p lab.Packet) bool {
				return p.Outgoing &&
					(p.Dst == estateVIPs[0] || p.Dst == estateVIPs[1])
			}); n > 0 {
				t.Errorf("%d packets to a VIP left the way they came", n)
			}
		})
	}
}

// All pods select the same target: it depends only on the flow, the size, the seed and the
// table.
func TestPodsAgreeOnFlows(t *testing.T) {
	x := newTopology(t, 2, 3, ConntrackOn)
	const first, flows = 10_000, 10_000
	for _, family := range vip.Families {
		var taken [2]map[uint16]string
		for pod := range x.pods {
			x.through(t, pod)
			for port := uint16(30000); port < 30020; port++ {
				x.ask(t, family, port, 10) // resolves the neighbors
			}
			for _, g := range x.targets {
				g.mu.Lock()
				clear(g.received)
				g.mu.Unlock()
			}
			x.sendUntilReceived(t, family, first, flows)
			taken[pod] = map[uint16]string{}
			for _, g := range x.targets {
				g.mu.Lock()
				for from := range g.received {
					taken[pod][from.Port()] = g.slot.Name
				}
				g.mu.Unlock()
			}
		}
		disagree, wrong := 0, 0
		for port := range flows {
			p := uint16(first + port)
			if taken[0][p] != taken[1][p] {
				disagree++
			}
			if taken[0][p] != x.expected(family, unix.IPPROTO_UDP, p) {
				wrong++
			}
		}
		if disagree > 0 || wrong > 0 {
			t.Errorf("%s: the pods disagree about %d of %d flows; %d are not where the hash puts them", family, disagree, flows,
				wrong)
		}
	}
}
