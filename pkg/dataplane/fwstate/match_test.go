package fwstate

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// match restricts the first pod to these ports; nil forwards all packets.
func (x *topology) match(t *testing.T, ports ...plan.Port) {
	t.Helper()
	f := x.fabrics[0]
	now, err := f.ReadStream("web")
	must(t, err)
	x.stream.Match = ports
	must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: x.stream, Observed: now}}}))
	mustHave(t, f, x.stream)
	x.refresh(t)
}

// counts returns the number of packets that the first pod dropped by match and forwarded.
func (x *topology) counts(t *testing.T) (dropped, forwarded uint64) {
	t.Helper()
	drops, err := x.fabrics[0].ReadUnmatched([]string{"web"})
	must(t, err)
	targets, err := x.fabrics[0].ReadTargets(x.numbers())
	must(t, err)
	for _, k := range targets {
		forwarded += k.Packets
	}
	return drops["web"], forwarded + x.taken(t)
}

// counted sends packets and waits until each was dropped or forwarded. Open connections may send
// more, so forwarded is a minimum.
func (x *topology) counted(t *testing.T, what string, dropped, forwarded uint64, send func() error) {
	t.Helper()
	d, n := x.counts(t)
	must(t, x.client.Do(send))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, lab.Eventually(ctx, 10*time.Millisecond, func() error {
		nowD, nowN := x.counts(t)
		if nowD-d != dropped || nowN-n < forwarded {
			return fmt.Errorf("%s: %d packets dropped and %d forwarded, want %d, and at least %d", what,
				nowD-d, nowN-n, dropped, forwarded)
		}
		return nil
	}))
}

// sendRaw sends the payload of an IP packet from the client to an address.
func sendRaw(protocol int, to netip.Addr, payload ...byte) func() error {
	return func() error {
		network := "ip4"
		if to.Is6() {
			network = "ip6"
		}
		c, err := net.Dial(fmt.Sprintf("%s:%d", network, protocol), to.String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(payload)
		return err
	}
}

func sendUDP(to netip.Addr, port uint16) func() error {
	return func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(to, port).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("hello"))
		return err
	}
}

var (
	tcpPort  = plan.Port{Protocol: unix.IPPROTO_TCP, Number: estatePort}
	udpPort  = plan.Port{Protocol: unix.IPPROTO_UDP, Number: estatePort}
	sctpPort = plan.Port{Protocol: unix.IPPROTO_SCTP, Number: estatePort}
)

func TestMatchForwardsItsPortsOnly(t *testing.T) {
	eachMode(t, 1, func(t *testing.T, x *topology, _ Conntrack) {
		x.match(t, tcpPort, udpPort, sctpPort)
		for _, family := range vip.Families {
			to := estateVIPs[family]
			x.ask(t, family, 20000, 10)
			x.ask(t, family, 20001, 4000) // fragments
			_, _, name := x.dial(t, family, 20000)
			if want := x.expected(family, unix.IPPROTO_TCP, 20000); name != want {
				t.Errorf("%s TCP went to %s, not to %s", family, name, want)
			}
			x.ping(t, family)
			x.counted(t, "UDP to another port", 1, 0, sendUDP(to, estatePort+1))
			// No target replies: the client would send an ICMP error for a packet without a socket.
			sctp := sendRaw(unix.IPPROTO_SCTP, to, 0x20, 0, estatePort>>8, estatePort&0xff, 0, 0, 0, 0, 0, 0, 0, 0)
			x.counted(t, "SCTP", 0, 1, sctp)
			x.counted(t, "SCTP to another port", 1, 0, sendRaw(unix.IPPROTO_SCTP, to,
				0x20, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0))
			x.counted(t, "TCP to another port", 1, 0, sendRaw(unix.IPPROTO_TCP, to,
				0x20, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0))
			// The bytes at the offset of the port equal the port of the match.
			x.counted(t, "GRE", 1, 0, sendRaw(unix.IPPROTO_GRE, to, 0, 0, estatePort>>8, estatePort&0xff))
			x.counted(t, "GRE that is too short for ports", 1, 0, sendRaw(unix.IPPROTO_GRE, to, 0))
			x.counted(t, "TCP that is too short for ports", 0, 1, func() error {
				if err := sendRaw(unix.IPPROTO_TCP, to, 0x20, 0)(); err != nil {
					return err
				}
				return sctp()
			})
		}
	})
}

func TestMatchOfPrefixVIPs(t *testing.T) {
	x := newTopology(t, 1, 1, ConntrackOn)
	must(t, x.fabrics[0].Write(plan.Change{VIPs: map[vip.VIP]string{
		vip.Require("20.0.1.0/24"): "web", vip.Require("2000:1::/64"): "web",
	}}))
	x.router.Shell(t, "ip route add 20.0.1.0/24 via 169.254.100.1; ip -6 route add 2000:1::/64 via fd64::1")
	x.match(t, udpPort)
	for _, to := range []string{"20.0.1.7", "2000:1::7"} {
		to := netip.MustParseAddr(to)
		x.counted(t, "the port of the match", 0, 1, sendUDP(to, estatePort))
		x.counted(t, "another port", 1, 0, sendUDP(to, estatePort+1))
	}
}

// Adding, changing and removing a match affects only flows of unmatched ports.
func TestMatchChangesUnderFlows(t *testing.T) {
	x := newTopology(t, 1, 3, ConntrackOn)
	send := func(family vip.Family) func() error { return func() error { return sendFrom(family, 20000, 1) } }
	for _, family := range vip.Families {
		c, r, _ := x.dial(t, family, 20000)
		want := x.ask(t, family, 20000, 10)
		flows := func(udp bool) {
			t.Helper()
			_, err := fmt.Fprintln(c, 1000)
			must(t, err)
			if _, err := io.CopyN(io.Discard, r, 1000); err != nil {
				t.Fatalf("%s: the connection ended: %v", family, err)
			}
			if udp {
				if got := x.ask(t, family, 20000, 10); got != want {
					t.Errorf("%s: the flow went to %s, not to %s", family, got, want)
				}
			}
		}
		// New flows move to the first target, established ones do not.
		x.stream.Tables = bothFamilies(filled(estateSize, 5000))
		x.match(t, tcpPort)
		flows(false)
		x.counted(t, "a flow that was forwarded before", 1, 0, send(family))
		x.match(t, tcpPort, udpPort)
		flows(true)
		if dropped, _ := x.counts(t); dropped != 1 {
			t.Errorf("%s: the counter is %d after a change of ports", family, dropped)
		}
		x.match(t, udpPort)
		x.ask(t, family, 20000, 10)
		x.match(t)
		flows(true)
		x.stream.Tables = bothFamilies(filled(estateSize, x.numbers()...))
		x.match(t)
	}
}
