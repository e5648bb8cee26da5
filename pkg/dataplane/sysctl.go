package dataplane

import (
	"fmt"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/vip"
)

// sysctlInterval is the time between two checks of the kernel parameters: the kernel
// reports changes of forwarding and rp_filter, of others none.
const sysctlInterval = time.Second

// sysctlProblem is a kernel parameter that has a wrong value.
type sysctlProblem struct {
	Problem
	family vip.Family
	// drops: packets of VIPs are lost, not only spread unevenly over gateways.
	drops bool
}

// withheld says by family why no packet of a VIP gets through, with the command that
// corrects it.
func withheld(wrong []sysctlProblem) (why [len(vip.Families)]string) {
	for _, p := range wrong {
		if p.drops && why[p.family] == "" {
			why[p.family] = fmt.Sprintf("%s: %s; run %s", p.Object, p.Detail, p.Remedy)
		}
	}
	return why
}

// sysctlSetting is a kernel parameter that must have one value.
type sysctlSetting struct {
	family vip.Family
	key    sysctl.Key
	value  string
	detail string
	drops  bool
}

// sysctlProblems returns the kernel parameters that keep packets of VIPs from their route.
func sysctlProblems(c *fwstate.Conn) []sysctlProblem {
	const (
		spread = "packets of one flow are spread over gateways by addresses only"
		// A packet that this host makes in answer to one with a target's mark, such as
		// "fragmentation needed", would go to the target instead of the client.
		reflect = "ICMP errors of this host about VIP traffic go to targets instead of clients"
	)
	settings := []sysctlSetting{
		{vip.IPv4, "net/ipv4/ip_forward", "1", "IPv4 packets are not forwarded", true},
		{vip.IPv4, "net/ipv4/fib_multipath_hash_policy", "1", spread, false},
		{vip.IPv4, "net/ipv4/fwmark_reflect", "0", reflect, true},
	}
	if c.HasIPv6() && sysctl.Key("net/ipv6/conf/all/disable_ipv6").Read() != "1" {
		settings = append(settings,
			sysctlSetting{vip.IPv6, "net/ipv6/conf/all/forwarding", "1", "IPv6 packets are not forwarded", true},
			sysctlSetting{vip.IPv6, "net/ipv6/fib_multipath_hash_policy", "1", spread, false},
			sysctlSetting{vip.IPv6, "net/ipv6/fwmark_reflect", "0", reflect, true},
		)
	}
	var problems []sysctlProblem
	for _, s := range settings {
		// What the kernel does not have cannot be wrong.
		if got := s.key.Read(); got != "" && got != s.value {
			problems = append(problems, sysctlProblem{Problem{
				Object: s.key.String(), Detail: fmt.Sprintf("it is %s: %s", got, s.detail), Remedy: s.key.SetCommand(s.value),
			}, s.family, s.drops})
		}
	}
	more, err := reversePathProblems(c)
	for _, p := range more {
		problems = append(problems, sysctlProblem{p, vip.IPv4, true})
	}
	if err != nil {
		problems = append(problems, sysctlProblem{Problem{Object: "interfaces", Detail: err.Error()}, vip.IPv4, false})
	}
	return problems
}

// reversePathProblems tells on which interfaces the kernel takes VIP traffic for forged.
//
// The larger value of "all" and of the interface counts (ip-sysctl). Strict filtering
// (1) wants the way to a packet's source to lead back through the interface that it
// came in by. The sources are clients and, in the answers of targets, VIPs: to both
// leads the default route of the main table, if any, so that only its interface is
// safe. Loose filtering (2) wants any route to the source.
func reversePathProblems(c *fwstate.Conn) ([]Problem, error) {
	links, err := c.Links()
	if err != nil {
		return nil, err
	}
	way, err := c.DefaultRouteLink()
	if err != nil {
		return nil, err
	}
	// The values are single digits, so that their text orders them.
	all := sysctl.IPv4Interface("all", "rp_filter").Read()
	var problems []Problem
	for _, l := range links {
		if !l.Up || l.Loopback {
			continue
		}
		filter := sysctl.IPv4Interface(l.Name, "rp_filter")
		own := filter.Read()
		detail := ""
		switch max(all, own) {
		case "1":
			if l.Index != way {
				detail = "strict reverse path filtering drops packets of VIPs that arrive on it"
			}
		case "2":
			if way == 0 {
				detail = "reverse path filtering drops packets from VIPs, to which no route leads"
			}
		}
		if detail != "" {
			remedy := filter.SetCommand("0")
			if all != "0" {
				remedy = "sysctl -w net.ipv4.conf.all.rp_filter=0 " + filter.String() + "=0"
			}
			detail = fmt.Sprintf("it is %s, that of all is %s: %s", own, all, detail)
			problems = append(problems, Problem{Object: filter.String(), Detail: detail, Remedy: remedy})
		}
		forwarding := sysctl.IPv4Interface(l.Name, "forwarding")
		if forwarding.Read() == "0" && sysctl.Key("net/ipv4/ip_forward").Read() == "1" {
			problems = append(problems, Problem{
				Object: forwarding.String(), Detail: "it is 0: IPv4 packets that come in by this interface are not forwarded",
				Remedy: forwarding.SetCommand("1"),
			})
		}
	}
	return problems, nil
}
