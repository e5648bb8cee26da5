package replypath

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/sysctl"
	"github.com/vipgate/vipgate/pkg/vip"
)

// usable reports whether the interface can carry replies of a family.
func (kernel *kernel) usable(network *network, family vip.Family) bool {
	return network.link.Flags&unix.IFF_UP != 0 && len(network.link.MAC) == len(placeholderMAC()) &&
		(family == vip.IPv4 || disabledIPv6(kernel.o.Interface).Read() == "0")
}

func disabledIPv6(link string) sysctl.Key {
	return sysctl.Key("net/ipv6/conf/" + link + "/disable_ipv6")
}

// replyParts returns the missing objects of the reply path in the order of installation. The drop
// rule precedes the lookup rule, so that replies without a route are dropped and never leave by
// another interface.
func (kernel *kernel) replyParts(network *network) (list []part) {
	for _, family := range kernel.families() {
		if !kernel.usable(network, family) {
			continue
		}
		// Without this entry the kernel would resolve the placeholder on the link.
		neighbor := rtnetlink.Neighbor{Link: network.link.Index, Addr: placeholder(family), MAC: placeholderMAC()}
		if !slices.ContainsFunc(network.neighbors, func(entry rtnetlink.Neighbor) bool {
			return entry.Link == neighbor.Link && entry.Addr == neighbor.Addr && entry.State == unix.NUD_PERMANENT &&
				slices.Equal(entry.MAC, neighbor.MAC)
		}) {
			list = append(list, part{neighbor.Permanent(), "neighbor " + neighbor.Addr.String()})
		}
		for _, route := range replyRoutes(network, family) {
			if !slices.ContainsFunc(network.routes, func(entry rtnetlink.Route) bool {
				// The flag follows the state of the interface and needs no repair.
				entry.Dead = false
				return entry == route
			}) {
				list = append(list, part{route.Replace(), route.String()})
			}
		}
	}
	for _, entry := range kernel.rules() {
		if !slices.ContainsFunc(network.rules, entry.Same) {
			list = append(list, part{entry.Add(), "rule " + entry.String()})
		}
	}
	return list
}

// replyRoutes returns the routes of a family. The next hop of replies resolves to the placeholder
// address, which the egress chain rewrites. Returned packets are sent to the placeholder itself, to
// which IPv6 has the route of link-local addresses.
func replyRoutes(network *network, family vip.Family) []rtnetlink.Route {
	reply := rtnetlink.Route{
		Family: family, Table: table, Prefix: rtnetlink.DefaultPrefix(family), Type: unix.RTN_UNICAST, Protocol: protocol,
		Metric: metric, Link: network.link.Index, NextHop: placeholder(family), OnLink: true,
	}
	if family == vip.IPv6 {
		return []rtnetlink.Route{reply}
	}
	back := reply
	back.Table, back.NextHop, back.OnLink = unix.RT_TABLE_MAIN, netip.Addr{}, false
	back.Prefix = netip.PrefixFrom(placeholder(family), placeholder(family).BitLen())
	return []rtnetlink.Route{reply, back}
}

// rules returns a lookup rule and a drop rule for each prefix. An unreachable route in the table
// would not drop all: IPv6 binds it to lo, so sockets bound to another interface bypass it (ADR 6).
func (kernel *kernel) rules() (list []rtnetlink.Rule) {
	for _, family := range kernel.families() {
		for _, prefix := range disjoint(kernel.o.Pool, family) {
			drop := rtnetlink.Rule{Family: family, Priority: priority + 1, Source: prefix, Protocol: protocol}
			lookup := drop
			drop.Action = unix.FR_ACT_UNREACHABLE
			lookup.Priority, lookup.Action, lookup.Table = priority, unix.FR_ACT_TO_TBL, table
			list = append(list, drop, lookup)
		}
	}
	return list
}

// acceptParts returns the missing local routes.
func (kernel *kernel) acceptParts(network *network) (list []part) {
	for _, route := range kernel.localRoutes(network) {
		if !slices.ContainsFunc(network.routes, sameLocal(route)) {
			list = append(list, part{route.Replace(), "local " + route.String()})
		}
	}
	return list
}

func (kernel *kernel) localRoutes(network *network) (list []rtnetlink.Route) {
	for _, family := range kernel.families() {
		for _, prefix := range disjoint(kernel.o.Pool, family) {
			list = append(list, rtnetlink.Route{
				Family: family, Table: unix.RT_TABLE_LOCAL, Prefix: prefix, Type: unix.RTN_LOCAL, Protocol: protocol,
				Metric: metric, Link: network.loopback,
			})
		}
	}
	return list
}

func sameLocal(route rtnetlink.Route) func(rtnetlink.Route) bool {
	return func(other rtnetlink.Route) bool {
		return other.Type == route.Type && other.Table == route.Table && other.Prefix == route.Prefix &&
			other.Link == route.Link
	}
}

// stale returns the requests that remove objects of an earlier start with different options, or
// all objects, in reverse order of installation.
func (kernel *kernel) stale(network *network, all bool) (list []part) {
	local, rules := kernel.localRoutes(network), kernel.rules()
	for _, entry := range network.routes {
		if entry.Table == unix.RT_TABLE_LOCAL && (all || !slices.ContainsFunc(local, sameLocal(entry))) {
			list = append(list, part{entry.Delete(), "local " + entry.String()})
		}
	}
	// Local routes first: without them no packet of the prefix is accepted.
	for _, entry := range network.rules {
		if entry.Protocol == protocol && (all || !slices.ContainsFunc(rules, entry.Same)) {
			list = append(list, part{entry.Delete(), "rule " + entry.String()})
		}
	}
	for _, entry := range network.routes {
		wanted := slices.ContainsFunc(replyRoutes(network, entry.Family), func(route rtnetlink.Route) bool {
			return route.Table == entry.Table && route.Prefix == entry.Prefix && route.Link == entry.Link
		})
		if entry.Table != unix.RT_TABLE_LOCAL && (all || !wanted || !slices.Contains(kernel.families(), entry.Family)) {
			list = append(list, part{entry.Delete(), entry.String()})
		}
	}
	for _, entry := range network.neighbors {
		if slices.Equal(entry.MAC, placeholderMAC()) && (all || entry.Link != network.link.Index) {
			list = append(list, part{entry.Delete(), "neighbor " + entry.Addr.String()})
		}
	}
	return list
}

// stalePool returns the accepted prefixes that are not in the pool.
func (kernel *kernel) stalePool(network *network) (list []netip.Prefix) {
	for _, route := range network.routes {
		if route.Table == unix.RT_TABLE_LOCAL && !slices.Contains(kernel.o.Pool, route.Prefix) {
			list = append(list, route.Prefix)
		}
	}
	return list
}
