package main

import (
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Numbers of the trench from which the bounds follow.
const (
	checkPort     = 5000
	checkInterval = 200 * time.Millisecond
	checkTimeout  = 200 * time.Millisecond
	checkFall     = 2
	lease         = time.Second
	holdTime      = 3 * time.Second
	drainTime     = 300 * time.Millisecond
	settle        = 50 * time.Millisecond
	// BFD guards the sessions of gateway B only. The gateway detects the loss of the pod after
	// bfdInterval × bfdMultiplier.
	bfdInterval   = 500 * time.Millisecond
	bfdMultiplier = 4
)

// The gateways.
const (
	gatewayA = iota // BIRD
	gatewayB        // FRR
	gateways
)

// The families.
const (
	ipv4 = iota
	ipv6
	families
)

// stream is a service of the trench. Every stream has two targets and one VIP of each family.
type stream struct {
	name     string
	minReady int
}

const targetsPerStream = 2

// untouchedStream is the stream that no fault of a target hits.
const untouchedStream = 4

var streams = []stream{{"stream-a", 1}, {"stream-b", 2}, {"stream-c", 1}, {"stream-d", 1}, {"stream-u", 1}}

// sharedBy are the streams that serve a further pair of VIPs together.
var sharedBy = []int{2, 3}

// service is a VIP with the streams that serve it; any of them makes it ready.
type service struct {
	prefix  netip.Prefix
	family  int
	streams []int
}

// vips are all VIPs; their indices are the bits of a scope.
var vips = func() []service {
	pair := func(n int, serving ...int) []service {
		return []service{
			{netip.PrefixFrom(netip.AddrFrom4([4]byte{20, 0, 0, byte(n)}), 32), ipv4, serving},
			{netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 15: byte(n)}), 128), ipv6, serving},
		}
	}
	var all []service
	for i := range streams {
		all = append(all, pair(i+1, i)...)
	}
	return append(all, pair(len(streams)+1, sharedBy...)...)
}()

// targetCount is the number of targets; target i belongs to stream i / targetsPerStream.
var targetCount = len(streams) * targetsPerStream

// targetAddr returns the address of a target.
func targetAddr(target, family int) netip.Addr {
	if family == ipv4 {
		return netip.AddrFrom4([4]byte{172, 16, 1, byte(10 + target)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 3: 0x16, 13: 1, 15: byte(10 + target)})
}

// clientAddr returns the address of a client of a gateway, to which only that gateway has a
// route: requests for VIPs come from it.
func clientAddr(g, family int) netip.Addr {
	if family == ipv4 {
		return netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + g)})
	}
	return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: byte(1 + g)})
}

// gatewayName returns the name of a gateway in reports.
func gatewayName(g int) string { return []string{"gateway A (BIRD)", "gateway B (FRR)"}[g] }

func familyName(f int) string { return []string{"IPv4", "IPv6"}[f] }

// scope is a set of VIPs at a set of gateways.
type scope struct {
	vips, gateways uint32
}

var (
	nothing    = scope{}
	everything = scope{vips: 1<<len(vips) - 1, gateways: 1<<gateways - 1}
)

// atGateway returns the VIPs of the families at one gateway.
func atGateway(g int, family ...int) scope {
	s := scope{gateways: 1 << g}
	for i, v := range vips {
		for _, f := range family {
			if v.family == f {
				s.vips |= 1 << i
			}
		}
	}
	return s
}

// ofStream returns the VIPs that a stream serves, at every gateway.
func ofStream(stream int) scope {
	s := scope{gateways: everything.gateways}
	for i, v := range vips {
		for _, n := range v.streams {
			if n == stream {
				s.vips |= 1 << i
			}
		}
	}
	return s
}

// has reports whether a VIP at a gateway is in the scope.
func (s scope) has(vip, gateway int) bool {
	return s.vips&(1<<vip) != 0 && s.gateways&(1<<gateway) != 0
}

// String returns the number of VIPs and gateways in a scope.
func (s scope) String() string {
	switch {
	case s.vips == 0 || s.gateways == 0:
		return "no VIP"
	case s == everything:
		return "every VIP"
	default:
		return fmt.Sprintf("%d VIPs at %d gateways", bits.OnesCount32(s.vips), bits.OnesCount32(s.gateways))
	}
}

// trenchText returns the trench file.
func trenchText() string { return trenchWithout() }

// trenchWithout returns the trench file without some VIPs, and without the streams that have no
// other VIP.
func trenchWithout(removed ...int) string {
	var b strings.Builder
	b.WriteString("trench: trench-a\nattractor:\n  name: attractor-a-1\n  vips:\n")
	for i, v := range vips {
		if !slices.Contains(removed, i) {
			fmt.Fprintf(&b, "    - %q\n", v.prefix)
		}
	}
	bfd := fmt.Sprintf("bfd: {minTx: %s, minRx: %s, multiplier: %d}", bfdInterval, bfdInterval, bfdMultiplier)
	fmt.Fprintf(&b, `  gateways:
    - {name: gateway-a4, address: %[1]q, holdTime: %[5]s}
    - {name: gateway-a6, address: %[2]q, holdTime: %[5]s}
    - {name: gateway-b4, address: %[3]q, holdTime: %[5]s, remoteASN: %[6]d, %[7]s}
    - {name: gateway-b6, address: %[4]q, holdTime: %[5]s, remoteASN: %[6]d, %[7]s}
streams:
`, lab.GatewayA4, lab.GatewayA6, lab.GatewayB4, lab.GatewayB6, holdTime, lab.GatewayBAS, bfd)
	for i, s := range streams {
		var served []netip.Prefix
		for n, v := range vips {
			if slices.Contains(v.streams, i) && !slices.Contains(removed, n) {
				served = append(served, v.prefix)
			}
		}
		if len(served) == 0 {
			continue
		}
		fmt.Fprintf(&b, "  - name: %s\n    minReady: %d\n    vips:\n", s.name, s.minReady)
		for _, v := range served {
			fmt.Fprintf(&b, "      - %q\n", v)
		}
		fmt.Fprintf(&b, "    check: {tcp: {port: %d}, via: address, interval: %s, timeout: %s, rise: 1, fall: %d}\n"+
			"    targets:\n", checkPort, checkInterval, checkTimeout, checkFall)
		for t := i * targetsPerStream; t < (i+1)*targetsPerStream; t++ {
			fmt.Fprintf(&b, "      - {name: target-%d, ips: [%q, %q]}\n", t, targetAddr(t, ipv4), targetAddr(t, ipv6))
		}
	}
	return b.String()
}
