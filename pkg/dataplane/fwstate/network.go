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
	for i, l := range list {
		links[i] = plan.Link{
			Name: l.Name, Index: l.Index, Up: l.Up(), Loopback: l.Flags&unix.IFF_LOOPBACK != 0, MTU: l.MTU,
		}
	}
	return links, err
}

// ReadNetwork reads links, addresses and neighbors. A failed neighbor remains failed during a new
// probe until it responds.
func (routing *Routing) ReadNetwork() (*plan.Network, error) {
	n := &plan.Network{LocalAddrs: map[netip.Addr]struct{}{}, FailedNeighbors: map[netip.Addr]struct{}{}}
	var err error
	if n.Links, err = routing.Links(); err != nil {
		return nil, err
	}
	addrs, err := routing.rt.Addresses()
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		n.LocalAddrs[a.Addr] = struct{}{}
		for i := range n.Links {
			if l := &n.Links[i]; l.Index == a.Link {
				l.Prefixes = append(l.Prefixes, a.Network)
			}
		}
	}
	routes, err := inFamilies(routing, func(family vip.Family) ([]rtnetlink.Route, error) {
		return routing.rt.Routes(family, rtnetlink.RouteFilter{Table: unix.RT_TABLE_LOCAL})
	})
	if err != nil {
		return nil, err
	}
	for _, r := range routes {
		if isLocalRoute(r) {
			n.LocalRoutes = append(n.LocalRoutes,
				plan.LocalRoute{Prefix: r.Prefix, Target: r.Protocol == rtnetlink.ProtocolTarget})
		}
	}
	neighbors, err := inFamilies(routing, routing.rt.Neighbors)
	if err != nil {
		return nil, err
	}
	failed, reachable := map[neighborKey]bool{}, map[netip.Addr]bool{}
	for _, e := range neighbors {
		key := neighborKey{e.Link, e.Addr}
		switch {
		case e.State&unix.NUD_FAILED != 0, e.State&unix.NUD_INCOMPLETE != 0 && routing.failedNeighbors[key]:
			failed[key] = true
		case e.State&(unix.NUD_REACHABLE|unix.NUD_PERMANENT) != 0:
			reachable[e.Addr] = true
		}
	}
	routing.failedNeighbors = failed
	for key := range failed {
		if !reachable[key.addr] {
			n.FailedNeighbors[key.addr] = struct{}{}
		}
	}
	return n, nil
}

// isLocalRoute reports whether a route delivers packets locally and was not added by the kernel
// for an address.
func isLocalRoute(r rtnetlink.Route) bool {
	return r.Table == unix.RT_TABLE_LOCAL && r.Type == unix.RTN_LOCAL && r.Protocol != unix.RTPROT_KERNEL
}

// maxSolicited limits the neighbors probed in one call. Map iteration selects a random subset.
const maxSolicited = 256

// SolicitNeighbors triggers probes of FAILED neighbors. Without packets to them the kernel never
// probes them, and it keeps the entries FAILED indefinitely while the table is small.
func (routing *Routing) SolicitNeighbors(addrs map[netip.Addr]struct{}) error {
	var probes []rtnetlink.Request
	for key := range routing.failedNeighbors {
		if _, ok := addrs[key.addr]; ok && len(probes) < maxSolicited {
			probes = append(probes, rtnetlink.Neighbor{Link: key.link, Addr: key.addr}.Probe())
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
// evaluates all rules and routes. It is invalid if the packet is dropped or uses a different
// table.
func (routing *Routing) ResolveNextHop(fwmark uint32, family vip.Family) (netip.Addr, error) {
	if family == vip.IPv6 && !routing.HasIPv6() {
		return netip.Addr{}, nil
	}
	r, err := routing.lookupRoute(family, fwmark)
	if err != nil || r.Table != fwmark || r.Type != unix.RTN_UNICAST {
		return netip.Addr{}, err
	}
	return r.NextHop, nil
}

// DefaultRouteLink returns the index of the egress interface of packets without a fwmark, or 0.
func (routing *Routing) DefaultRouteLink() (int, error) {
	r, err := routing.lookupRoute(vip.IPv4, 0)
	if err != nil || r.Type != unix.RTN_UNICAST {
		return 0, err
	}
	return r.Link, nil
}

// lookupRoute returns the route of a packet with a fwmark; the zero Route if it is dropped.
func (routing *Routing) lookupRoute(family vip.Family, fwmark uint32) (rtnetlink.Route, error) {
	r, err := routing.rt.Lookup(documentationAddresses[family], fwmark)
	if rejected, ok := errors.AsType[*nlmsg.Error](err); ok {
		switch rejected.Errno {
		case unix.EINVAL, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.ENETDOWN:
			return r, nil // blackhole, unreachable, no route, prohibit
		}
	}
	return r, err
}
