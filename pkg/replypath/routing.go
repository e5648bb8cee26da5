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
func (k *kernel) usable(n *network, f vip.Family) bool {
	return n.link.Flags&unix.IFF_UP != 0 && len(n.link.MAC) == len(placeholderMAC()) &&
		(f == vip.IPv4 || disabledIPv6(k.o.Interface).Read() == "0")
}

func disabledIPv6(link string) sysctl.Key {
	return sysctl.Key("net/ipv6/conf/" + link + "/disable_ipv6")
}

// replyParts returns the missing objects of the reply path in the order of installation. The drop
// rule precedes the lookup rule, so that replies without a route are dropped and never leave by
// another interface.
func (k *kernel) replyParts(n *network) (list []part) {
	for _, f := range k.families() {
		if !k.usable(n, f) {
			continue
		}
		neighbor := rtnetlink.Neighbor{Link: n.link.Index, Addr: placeholder(f), MAC: placeholderMAC()}
		if !slices.ContainsFunc(n.neighbors, func(m rtnetlink.Neighbor) bool {
			return m.Link == neighbor.Link && m.Addr == neighbor.Addr && m.State == unix.NUD_PERMANENT &&
				slices.Equal(m.MAC, neighbor.MAC)
		}) {
			list = append(list, part{neighbor.Permanent(), "neighbor " + neighbor.Addr.String()})
		}
		route := rtnetlink.Route{
			Family: f, Table: table, Prefix: rtnetlink.DefaultPrefix(f), Type: unix.RTN_UNICAST, Protocol: protocol,
			Metric: metric, Link: n.link.Index, NextHop: placeholder(f), OnLink: true,
		}
		if !slices.ContainsFunc(n.routes, func(r rtnetlink.Route) bool {
			r.Dead = false
			return r == route
		}) {
			list = append(list, part{route.Replace(), route.String()})
		}
	}
	for _, r := range k.rules() {
		if !slices.ContainsFunc(n.rules, r.Same) {
			list = append(list, part{r.Add(), "rule " + r.String()})
		}
	}
	return list
}

// rules returns a lookup rule and a drop rule for each prefix. An unreachable route in the table
// would not drop all packets: IPv6 binds it to lo, so sockets bound to another interface bypass it
// (ADR 6).
func (k *kernel) rules() (list []rtnetlink.Rule) {
	for _, f := range k.families() {
		for _, p := range disjoint(k.o.Pool, f) {
			drop := rtnetlink.Rule{Family: f, Priority: priority + 1, Source: p, Protocol: protocol}
			lookup := drop
			drop.Action = unix.FR_ACT_UNREACHABLE
			lookup.Priority, lookup.Action, lookup.Table = priority, unix.FR_ACT_TO_TBL, table
			list = append(list, drop, lookup)
		}
	}
	return list
}

// acceptParts returns the missing local routes.
func (k *kernel) acceptParts(n *network) (list []part) {
	for _, r := range k.localRoutes(n) {
		if !slices.ContainsFunc(n.routes, sameLocal(r)) {
			list = append(list, part{r.Replace(), "local " + r.String()})
		}
	}
	return list
}

func (k *kernel) localRoutes(n *network) (list []rtnetlink.Route) {
	for _, f := range k.families() {
		for _, p := range disjoint(k.o.Pool, f) {
			list = append(list, rtnetlink.Route{
				Family: f, Table: unix.RT_TABLE_LOCAL, Prefix: p, Type: unix.RTN_LOCAL, Protocol: protocol, Metric: metric,
				Link: n.loopback,
			})
		}
	}
	return list
}

func sameLocal(r rtnetlink.Route) func(rtnetlink.Route) bool {
	return func(s rtnetlink.Route) bool {
		return s.Type == r.Type && s.Table == r.Table && s.Prefix == r.Prefix && s.Link == r.Link
	}
}

// stale returns the requests that remove objects of an earlier start with different options, or
// all objects, in reverse order of installation.
func (k *kernel) stale(n *network, all bool) (list []part) {
	local, rules := k.localRoutes(n), k.rules()
	for _, r := range n.routes {
		if r.Table == unix.RT_TABLE_LOCAL && (all || !slices.ContainsFunc(local, sameLocal(r))) {
			list = append(list, part{r.Delete(), "local " + r.String()})
		}
	}
	for _, r := range n.rules {
		if r.Protocol == protocol && (all || !slices.ContainsFunc(rules, r.Same)) {
			list = append(list, part{r.Delete(), "rule " + r.String()})
		}
	}
	for _, r := range n.routes {
		if r.Table != unix.RT_TABLE_LOCAL && (all || r.Table != table || r.Link != n.link.Index ||
			!slices.Contains(k.families(), r.Family)) {
			list = append(list, part{r.Delete(), r.String()})
		}
	}
	for _, m := range n.neighbors {
		if slices.Equal(m.MAC, placeholderMAC()) && (all || m.Link != n.link.Index) {
			list = append(list, part{m.Delete(), "neighbor " + m.Addr.String()})
		}
	}
	return list
}

// stalePool returns the accepted prefixes that are not in the pool.
func (k *kernel) stalePool(n *network) (list []netip.Prefix) {
	for _, r := range n.routes {
		if r.Table == unix.RT_TABLE_LOCAL && !slices.Contains(k.o.Pool, r.Prefix) {
			list = append(list, r.Prefix)
		}
	}
	return list
}
