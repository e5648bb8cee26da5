package plan

import (
	"fmt"
	"iter"
	"net/netip"
)

// MTUProblems returns the links toward targets with a smaller MTU than the largest to the gateways.
func (network *Network) MTUProblems(gateways []netip.Addr, targets iter.Seq[netip.Addr]) (problems []Problem) {
	var external Link
	for _, gateway := range gateways {
		if link, ok := network.LinkTo(gateway); ok && link.Up && link.MTU > external.MTU {
			external = link
		}
	}
	leadsToTarget := func(link Link) bool {
		for target := range targets {
			if to, ok := network.LinkTo(target); ok && to.Index == link.Index {
				return true
			}
		}
		return false
	}
	for _, link := range network.Links {
		if link.Up && link.MTU < external.MTU && leadsToTarget(link) {
			problems = append(problems, Problem{
				Object: "link " + link.Name,
				Detail: fmt.Sprintf("its MTU is %d, that of %s toward the gateways %d: larger packets of clients are lost, "+
					"unless ICMP errors reach the clients", link.MTU, external.Name, external.MTU),
				Remedy: fmt.Sprintf("raise the MTU of the targets' network: ip link set dev %s mtu %d; "+
					"or clamp the TCP MSS at the gateways", link.Name, external.MTU),
			})
		}
	}
	return problems
}
