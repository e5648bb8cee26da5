package dataplane

import (
	"fmt"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// mtuProblems returns the links toward targets with a smaller MTU than the largest MTU toward the
// gateways.
func (engine *engine) mtuProblems() (problems []Problem) {
	if engine.options.Gateways == nil || engine.network == nil {
		return nil
	}
	var external plan.Link
	for _, gateway := range engine.options.Gateways() {
		if l, ok := engine.network.LinkTo(gateway); ok && l.Up && l.MTU > external.MTU {
			external = l
		}
	}
	for _, link := range engine.network.Links {
		if link.Up && link.MTU < external.MTU && engine.leadsToTarget(link) {
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

// leadsToTarget reports whether a target is on a connected network of the link.
func (engine *engine) leadsToTarget(link plan.Link) bool {
	for _, m := range engine.streams {
		for a := range m.addresses {
			if to, ok := engine.network.LinkTo(a); ok && to.Index == link.Index {
				return true
			}
		}
	}
	return false
}
