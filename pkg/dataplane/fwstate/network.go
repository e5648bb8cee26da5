package fwstate

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

type neighborKey struct {
	link int
	addr netip.Addr
}

// Links lists the network interfaces, without their prefixes.
func (routing *Routing) Links() ([]plan.Link, error) {
	list, err := routing.rt.Links()
	links := make([]plan.Link, len(list))
	for index, link := range list {
		links[index] = plan.Link{
			Name: link.Name, Index: link.Index, Up: link.Up(), Loopback: link.Flags&unix.IFF_LOOPBACK != 0, MTU: link.MTU,
			Ethernet: link.Ethernet, Port: link.Master != 0,
		}
	}
	return links, err
}

// ReadNetwork reads links, addresses and neighbors. A failed neighbor remains failed during a new
// probe until it responds.
func (routing *Routing) ReadNetwork() (*plan.Network, error) {
	network := &plan.Network{
		LocalAddrs: map[netip.Addr]struct{}{}, FailedNeighbors: map[netip.Addr]struct{}{},
		LinkAddresses: map[netip.Addr]plan.LinkAddress{},
	}
	var err error
	if network.Links, err = routing.Links(); err != nil {
		return nil, err
	}
	addrs, err := routing.rt.Addresses()
	if err != nil {
		return nil, err
	}
	for _, address := range addrs {
		network.LocalAddrs[address.Addr] = struct{}{}
		for i := range network.Links {
			if link := &network.Links[i]; link.Index == address.Link {
				link.Prefixes = append(link.Prefixes, address.Network)
			}
		}
	}
	// Local routes of other processes could deliver packets of VIPs in this namespace.
	routes, err := inFamilies(routing, func(family vip.Family) ([]rtnetlink.Route, error) {
		return routing.rt.Routes(family, rtnetlink.RouteFilter{Table: unix.RT_TABLE_LOCAL})
	})
	if err != nil {
		return nil, err
	}
	for _, route := range routes {
		if isLocalRoute(route) {
			network.LocalRoutes = append(network.LocalRoutes,
				plan.LocalRoute{Prefix: route.Prefix, Target: route.Protocol == rtnetlink.ProtocolTarget})
		}
	}
	// An entry that fails leaves FAILED for INCOMPLETE with every probe, so the last read decides.
	neighbors, err := inFamilies(routing, routing.rt.Neighbors)
	if err != nil {
		return nil, err
	}
	failed, reachable := map[neighborKey]bool{}, map[netip.Addr]bool{}
	for _, entry := range neighbors {
		key := neighborKey{entry.Link, entry.Addr}
		switch {
		case entry.State&unix.NUD_FAILED != 0, entry.State&unix.NUD_INCOMPLETE != 0 && routing.failedNeighbors[key]:
			failed[key] = true
		// DELAY and PROBE: packets use this link.
		case entry.State&(unix.NUD_REACHABLE|unix.NUD_PERMANENT|unix.NUD_DELAY|unix.NUD_PROBE) != 0:
			reachable[entry.Addr] = true
		}
		if link := (plan.LinkAddress{}); len(entry.MAC) == len(link) && !failed[key] {
			network.LinkAddresses[entry.Addr] = plan.LinkAddress(entry.MAC)
		}
	}
	routing.failedNeighbors = failed
	// A target may be reachable on one of several links.
	for key := range failed {
		if !reachable[key.addr] {
			network.FailedNeighbors[key.addr] = struct{}{}
		}
	}
	return network, nil
}

// isLocalRoute reports whether a route delivers packets locally and is not the kernel's own.
func isLocalRoute(route rtnetlink.Route) bool {
	return route.Table == unix.RT_TABLE_LOCAL && route.Type == unix.RTN_LOCAL && route.Protocol != unix.RTPROT_KERNEL
}

// maxSolicited limits the neighbors probed in one call. Map iteration selects a random subset.
const maxSolicited = 256

// SolicitNeighbors triggers probes of FAILED neighbors. Without packets to them the kernel never
// probes them, and it keeps the entries FAILED indefinitely while the table is small.
func (routing *Routing) SolicitNeighbors(addrs map[netip.Addr]struct{}) error {
	var probes []rtnetlink.Request
	for key := range routing.failedNeighbors {
		if _, ok := addrs[key.addr]; ok && len(probes) < maxSolicited {
			probes = append(probes, rtnetlink.Neighbor{Link: key.link, Addr: key.addr}.Probe(0))
		}
	}
	rejected, err := routing.rt.Do(probes...)
	if err != nil {
		return fmt.Errorf("failed to probe %d failed neighbors: %w", len(probes), err)
	}
	for _, err := range rejected {
		// The entry was removed since it was read.
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	return nil
}

// documentationAddresses are never local (RFC 5737, RFC 3849).
var documentationAddresses = [...]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// ResolveNextHop returns the next hop of a packet with a fwmark from a kernel route lookup, which
// evaluates all rules and routes. It is invalid if the packet is dropped or uses a different table.
func (routing *Routing) ResolveNextHop(fwmark uint32, family vip.Family) (netip.Addr, error) {
	if family == vip.IPv6 && !routing.HasIPv6() {
		return netip.Addr{}, nil
	}
	route, err := routing.lookupRoute(family, fwmark)
	if err != nil || route.Table != fwmark || route.Type != unix.RTN_UNICAST {
		return netip.Addr{}, err
	}
	return route.NextHop, nil
}

// DefaultRouteLink returns the index of the egress interface of packets without a fwmark, or 0.
func (routing *Routing) DefaultRouteLink() (int, error) {
	route, err := routing.lookupRoute(vip.IPv4, 0)
	if err != nil || route.Type != unix.RTN_UNICAST {
		return 0, err
	}
	return route.Link, nil
}

// lookupRoute returns the route of a packet with a fwmark; the zero Route if it is dropped.
func (routing *Routing) lookupRoute(family vip.Family, fwmark uint32) (rtnetlink.Route, error) {
	route, err := routing.rt.Lookup(documentationAddresses[family], fwmark)
	if rejected, ok := errors.AsType[*nlmsg.Error](err); ok {
		switch rejected.Errno {
		case unix.EINVAL, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.ENETDOWN:
			return route, nil // blackhole, unreachable, no route, prohibit
		}
	}
	return route, err
}
