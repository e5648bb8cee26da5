package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/vip"
)

// checkSysctls returns an error, with the remedy, while a kernel parameter makes the kernel drop
// packets that arrive for VIPs of a family.
func (reconciler *reconciler) checkSysctls(family vip.Family) error {
	if reconciler.policy.External == nil {
		return nil
	}
	external := reconciler.policy.External()
	forwarding := sysctl.IPv4Interface(external, "forwarding")
	if family == vip.IPv6 {
		// The IPv6 sysctl of a single interface only controls router advertisements.
		forwarding = "net/ipv6/conf/all/forwarding"
	}
	switch forwarding.Read() {
	case "1":
		reconciler.forwarded[family] = true
	case "0":
		if !reconciler.forwarded[family] {
			break // off from the start: the pod delivers VIPs itself, or bypasses the kernel
		}
		if family == vip.IPv4 && sysctl.IPv4Interface("all", "forwarding").Read() == "0" {
			forwarding = "net/ipv4/ip_forward"
		}
		return fmt.Errorf("%s packets are not forwarded: run %s", family, forwarding.SetCommand("1"))
	}
	own := sysctl.IPv4Interface(external, "rp_filter")
	if family == vip.IPv4 && reversePathFilter(own) == "1" && !defaultRouteVia(external) {
		return fmt.Errorf("strict reverse path filtering drops packets that arrive on %s: run %s",
			external, own.SetCommand("2"))
	}
	return nil
}

// reversePathFilter returns the effective value of rp_filter: the maximum of conf/all and the
// interface (ip-sysctl, rp_filter).
func reversePathFilter(own sysctl.Key) string {
	return max(sysctl.IPv4Interface("all", "rp_filter").Read(), own.Read())
}

// defaultRouteVia reports whether the default route of unmarked packets uses the interface: the
// strict filter then accepts packets that arrive on it.
func defaultRouteVia(name string) bool {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return false
	}
	conn, err := rtnetlink.Dial()
	if err != nil {
		return false
	}
	defer conn.Close()
	route, err := conn.Lookup(netip.AddrFrom4([4]byte{192, 0, 2, 1}), 0) // TEST-NET-1, RFC 5737
	return err == nil && route.Link == i.Index
}

// reversePathProblems names the interfaces on which the strict filter drops traffic to VIPs.
func reversePathProblems() []string {
	var problems []string
	for _, key := range sysctl.Glob("net/ipv4/conf/*/rp_filter") {
		name := strings.Split(string(key), "/")[3]
		if name == "all" || name == "default" || name == "lo" || reversePathFilter(key) != "1" {
			continue
		}
		problems = append(problems, fmt.Sprintf("interface %s filters by strict reverse path: "+
			"VIP traffic that enters through it is dropped; set %s to 2, "+
			"or it and net.ipv4.conf.all.rp_filter to 0", name, key))
	}
	return problems
}
