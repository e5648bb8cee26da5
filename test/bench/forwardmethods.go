package main

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/test/lab"
)

// Methods to forward a packet through the pod's namespace that are compared with vipgate.
const (
	forwardRatio = "time per packet ÷ that of plain forwarding"

	forwardPlain     = "plain forwarding"
	forwardRule      = "plain, one ip rule"
	forwardTracked   = "plain, conntrack on"
	forwardStateless = "vipgate, --conntrack=off"
	forwardFast      = "vipgate, fast path"
	forwardLoose     = "vipgate, --conntrack=loose"
	forwardNone      = "sending alone"
	forwardMatch     = "vipgate, match of 100 ports"
	forwardVIPs      = "vipgate, 10 000 VIPs"
	forwardVIPsMatch = "vipgate, 10 000 VIPs, match of 100 ports"
	forwardFastVIPs  = "vipgate, fast path, 10 000 VIPs"

	// With the kernel state of a frontend in the same pod.
	forwardStatelessFrontend = "vipgate, --conntrack=off, beside a frontend"
	forwardFastFrontend      = "vipgate, fast path, beside a frontend"

	// The interfaces of the pod are macvlans.
	forwardMacvlan          = "plain forwarding, macvlan"
	forwardStatelessMacvlan = "vipgate, --conntrack=off, macvlan"
	forwardFastMacvlan      = "vipgate, fast path, macvlan"
)

// pathVariant describes a method: the number of VIPs, 0 without a data plane, and of ports in the
// match.
type pathVariant struct {
	vips, ports       int
	conntrack         dataplane.Conntrack
	fastPath          dataplane.FastPath
	frontend, macvlan bool
}

var pathVariants = func() map[string]pathVariant {
	stateless := pathVariant{vips: 1, conntrack: dataplane.ConntrackOff}
	fast := stateless
	fast.fastPath = dataplane.FastPathAuto
	with := func(v pathVariant, change func(*pathVariant)) pathVariant { change(&v); return v }
	frontend := func(v *pathVariant) { v.frontend = true }
	macvlan := func(v *pathVariant) { v.macvlan = true }
	return map[string]pathVariant{
		vipgate: {vips: 1}, forwardMatch: {vips: 1, ports: 100},
		forwardStateless: stateless, forwardFast: fast,
		forwardLoose: {vips: 1, conntrack: dataplane.ConntrackLoose},
		forwardVIPs:  {vips: 10_000}, forwardVIPsMatch: {vips: 10_000, ports: 100},
		forwardFastVIPs:          with(fast, func(v *pathVariant) { v.vips = 10_000 }),
		forwardStatelessFrontend: with(stateless, frontend), forwardFastFrontend: with(fast, frontend),
		forwardMacvlan:          {macvlan: true},
		forwardStatelessMacvlan: with(stateless, macvlan), forwardFastMacvlan: with(fast, macvlan),
	}
}()

// withoutMatch maps each method with a match to the one without, with which it is compared.
var withoutMatch = map[string]string{forwardMatch: vipgate, forwardVIPsMatch: forwardVIPs}

// hasForwardGoal reports whether the goal of row 18 is for a method.
func hasForwardGoal(method string) bool {
	v := pathVariants[method]
	return v.vips == 1 && v.ports == 0 && !v.frontend && !v.macvlan
}

// forwardPlan is one path of row 18.
type forwardPlan struct {
	method  string
	targets int
}

// forwardPlans returns the paths of row 18. The first is the baseline of the comparison, the second
// the cost of sending, which is subtracted from every method, the third has a rule.
func forwardPlans(quick bool) []forwardPlan {
	plans := []forwardPlan{{forwardPlain, 1}, {forwardNone, 1}, {forwardRule, 1}}
	methods := []string{forwardStateless, forwardFast, forwardLoose, vipgate}
	for _, method := range methods {
		plans = append(plans, forwardPlan{method, 10})
	}
	plans = append(plans, forwardPlan{forwardMatch, 10})
	if quick {
		return plans
	}
	for _, method := range methods {
		plans = append(plans, forwardPlan{method, 1}, forwardPlan{method, 100})
	}
	return append(plans, []forwardPlan{
		{forwardTracked, 1},
		{forwardVIPs, 10},
		{forwardVIPsMatch, 10},
		{forwardFastVIPs, 10},
		{forwardStatelessFrontend, 10},
		{forwardFastFrontend, 10},
		{forwardMacvlan, 1},
		{forwardStatelessMacvlan, 10},
		{forwardFastMacvlan, 10},
	}...)
}

// routeBySource runs the source routing of a frontend with the VIP in the pod.
func (p *forwardPath) routeBySource(ctx context.Context) error {
	frontend := &packetPath{lab: p.fixture.Lab, vips: 1}
	p.ends = append(p.ends, func() error {
		var errs []error
		for _, end := range frontend.cleanup {
			errs = append(errs, end())
		}
		return errors.Join(errs...)
	})
	return errors.Join(
		p.fixture.Pod.IP("route", "add", "default", "via", lab.GatewayA4.String(), "table", "4096"),
		frontend.routeBySet(ctx),
	)
}

// overMacvlan replaces the interfaces of the pod by macvlans of the same names and IPv4 addresses.
// The previous interfaces become their parents in the namespace of a node.
func (p *forwardPath) overMacvlan() error {
	node, err := lab.Create()
	if err != nil {
		return err
	}
	p.ends = append(p.ends, node.Close)
	pod := p.fixture.Pod
	for _, name := range []string{lab.External, lab.Internal} {
		var addresses []net.Addr
		if err := pod.Do(func() error {
			at, err := net.InterfaceByName(name)
			if err == nil {
				addresses, err = at.Addrs()
			}
			return err
		}); err != nil {
			return fmt.Errorf("addresses of %s: %w", name, err)
		}
		if err := errors.Join(
			pod.IP("link", "set", name, "netns", node.Name()),
			node.IP("link", "add", "link", name, "name", name, "netns", pod.Name(), "type", "macvlan", "mode", "bridge"),
			node.IP("link", "set", name, "up"), pod.IP("link", "set", name, "up"),
			pod.Sysctl("net.ipv4.conf."+name+".rp_filter", "0"),
		); err != nil {
			return err
		}
		for _, address := range addresses {
			if network, ok := address.(*net.IPNet); ok && network.IP.To4() != nil {
				if err := pod.Addr(name, network.String()); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
