package dataplane

import (
	"fmt"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// mtuProblems returns the links toward targets with a smaller MTU than the largest MTU toward the
// gateways.
func (e *engine) mtuProblems() (problems []Problem) {
	if e.options.Gateways == nil || e.network == nil {
		return nil
	}
	var external plan.Link
	for _, gateway := range e.options.Gateways() {
		if l, ok := e.network.LinkTo(gateway); ok && l.Up && l.MTU > external.MTU {
			external = l
		}
	}
	for _, l := range e.network.Links {
		if l.Up && l.MTU < external.MTU && e.leadsToTarget(l) {
			problems = append(problems, Problem{
				Object: "link " + l.Name,
				Detail: fmt.Sprintf("its MTU is %d, that of %s toward the gateways %d: larger packets of clients are lost, "+
					"unless ICMP errors reach the clients", l.MTU, external.Name, external.MTU),
				Remedy: fmt.Sprintf("raise the MTU of the targets' network: ip link set dev %s mtu %d; "+
					"or clamp the TCP MSS at the gateways", l.Name, external.MTU),
			})
		}
	}
	return problems
}

// leadsToTarget reports whether a target is on a connected network of the link.
func (e *engine) leadsToTarget(l plan.Link) bool {
	for _, m := range e.streams {
		for a := range m.addresses {
			if to, ok := e.network.LinkTo(a); ok && to.Index == l.Index {
				return true
			}
		}
	}
	return false
}
