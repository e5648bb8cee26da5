package dataplane

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/fastpath"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Preflight returns the conditions that prevent the data plane from working in the network
// namespace of the calling thread, with remedies. It changes nothing. Wrong kernel parameters are
// excluded: a Plane reports them and withholds the affected families until they are corrected.
func Preflight(options Options) []Problem {
	if problem := lacksCapability(); problem != nil {
		return []Problem{*problem} // all other checks require it
	}
	conn, err := fwstate.Dial(options.Config.WithDefaults())
	if err != nil {
		return []Problem{{Object: "netlink", Detail: err.Error(), Remedy: "run it on a Linux kernel with netlink sockets"}}
	}
	problems := conn.MissingModules()
	if err := conn.Close(); err != nil {
		problems = append(problems, Problem{Object: "netlink", Detail: err.Error()})
	}
	if options.FastPath == FastPathRequired {
		if err := fastpath.Probe(); err != nil {
			problems = append(problems, Problem{
				Object: "fast path", Detail: err.Error(),
				Remedy: "add BPF to the capabilities of the container, on Linux 6.6 or newer; or run with --dataplane=fastpath",
			})
		}
	}
	return problems
}

// liberal is the kernel parameter that lets connection tracking accept packets outside the window.
const liberal = sysctl.Key("net/netfilter/nf_conntrack_tcp_be_liberal")

// Advice returns optional changes to the calling thread's network namespace. It changes nothing.
func Advice(o Options) []Problem {
	if o.Conntrack != ConntrackOn || liberal.Read() != "0" { // absent before the first tracked packet
		return nil
	}
	return []Problem{{
		Object: liberal.String(),
		Detail: "it is 0: a TCP connection that gateways move to another pod and back is invalid here, and lost when its " +
			"target drains",
		Remedy: liberal.SetCommand("1"),
	}}
}

func lacksCapability() *Problem {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // version 3 has two words for 64 capabilities
	if err := unix.Capget(&header, &data[0]); err != nil {
		return &Problem{Object: "CAP_NET_ADMIN", Detail: "the capabilities of this process cannot be read: " + err.Error()}
	}
	if data[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0 {
		return nil
	}
	return &Problem{
		Object: "CAP_NET_ADMIN", Detail: "this process may not change nftables and routing",
		Remedy: `add NET_ADMIN to the container: securityContext: {capabilities: {add: ["NET_ADMIN"]}}`,
	}
}

// sysctlInterval is the period of kernel parameter checks: the kernel sends notifications for
// forwarding and rp_filter only.
const sysctlInterval = time.Second

// sysctlProblem is a kernel parameter with a wrong value.
type sysctlProblem struct {
	Problem
	family vip.Family
	// drops: packets of VIPs are lost, rather than only spread unevenly over gateways.
	drops bool
}

// sysctlProblems returns the kernel parameters that misroute or drop packets of VIPs.
func sysctlProblems(conn *fwstate.Conn) (problems []sysctlProblem) {
	check := func(family vip.Family, key sysctl.Key, want, detail string, drops bool) {
		// A missing parameter reads as "" and is not a problem.
		if got := key.Read(); got != "" && got != want {
			detail = fmt.Sprintf("it is %s: %s", got, detail)
			problem := Problem{Object: key.String(), Detail: detail, Remedy: key.SetCommand(want)}
			problems = append(problems, sysctlProblem{problem, family, drops})
		}
	}
	checkFamily := func(family vip.Family, directory, forwarding sysctl.Key, name string) {
		check(family, directory+forwarding, "1", name+" packets are not forwarded", true)
		check(family, directory+"fib_multipath_hash_policy", "1",
			"packets of one flow are spread over gateways by addresses only", false)
		// A packet that the kernel generates in reply to one with a target's fwmark, such as
		// "fragmentation needed", would be sent to the target instead of the client.
		check(family, directory+"fwmark_reflect", "0",
			"ICMP errors of this host about VIP traffic go to targets instead of clients", true)
	}
	checkFamily(vip.IPv4, "net/ipv4/", "ip_forward", "IPv4")
	if conn.HasIPv6() && sysctl.Key("net/ipv6/conf/all/disable_ipv6").Read() != "1" {
		checkFamily(vip.IPv6, "net/ipv6/", "conf/all/forwarding", "IPv6")
	}
	more, err := reversePathProblems(conn)
	for _, p := range more {
		problems = append(problems, sysctlProblem{p, vip.IPv4, true})
	}
	if err != nil {
		problems = append(problems, sysctlProblem{Problem{Object: "interfaces", Detail: err.Error()}, vip.IPv4, false})
	}
	return problems
}

// reversePathProblems returns the interfaces on which reverse path filtering drops VIP traffic.
//
// The larger value of "all" and of the interface applies (ip-sysctl). Strict filtering (1)
// requires that the route to a packet's source uses its input interface. The sources are clients
// and, in replies of targets, VIPs. Both use the default route of the main table, if any, so only
// its interface is safe. Loose filtering (2) requires any route to the source.
func reversePathProblems(conn *fwstate.Conn) (problems []Problem, err error) {
	links, err := conn.Links()
	if err != nil {
		return nil, err
	}
	defaultLink, err := conn.DefaultRouteLink()
	if err != nil {
		return nil, err
	}
	// The values are single digits, so they can be compared as strings.
	all := sysctl.IPv4Interface("all", "rp_filter").Read()
	for _, link := range links {
		// A link that comes up is checked within sysctlInterval.
		if !link.Up || link.Loopback {
			continue
		}
		filter := sysctl.IPv4Interface(link.Name, "rp_filter")
		own := filter.Read()
		detail := ""
		switch value := max(all, own); {
		case value == "1" && link.Index != defaultLink:
			detail = "strict reverse path filtering drops packets of VIPs that arrive on it"
		case value == "2" && defaultLink == 0:
			detail = "reverse path filtering drops packets from VIPs, to which no route leads"
		}
		if detail != "" {
			remedy := filter.SetCommand("0")
			// The larger of both values applies, so the remedy sets both.
			if all != "0" {
				remedy = "sysctl -w net.ipv4.conf.all.rp_filter=0 " + filter.String() + "=0"
			}
			detail = fmt.Sprintf("it is %s, that of all is %s: %s", own, all, detail)
			problems = append(problems, Problem{Object: filter.String(), Detail: detail, Remedy: remedy})
		}
		forwarding := sysctl.IPv4Interface(link.Name, "forwarding")
		// With ip_forward 0 no interface forwards; sysctlProblems reports that once.
		if forwarding.Read() == "0" && sysctl.Key("net/ipv4/ip_forward").Read() == "1" {
			problems = append(problems, Problem{
				Object: forwarding.String(), Detail: "it is 0: IPv4 packets that come in by this interface are not forwarded",
				Remedy: forwarding.SetCommand("1"),
			})
		}
	}
	return problems, nil
}
