package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	routeHeader   = 12 // struct rtmsg
	nextHopHeader = 8  // struct rtnexthop
)

// nextHops returns the next hops of the routes to a prefix in the main table with their weights, 0
// for a single one. Waits ask for it often: a process of ip costs a hundred times as much.
func (n *NetNS) nextHops(to netip.Prefix) (_ map[netip.Addr]int, err error) {
	fail := func(err error) (map[netip.Addr]int, error) {
		return nil, fmt.Errorf("routes to %s in %s: %w", to, n.name, err)
	}
	namespace, err := os.Open(n.Path())
	if err != nil {
		return fail(err)
	}
	defer namespace.Close()
	conn, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{NetNS: int(namespace.Fd())})
	if err != nil {
		return fail(err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	family := byte(unix.AF_INET)
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	routes, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{family}, make([]byte, routeHeader-1)...),
	})
	if err != nil {
		return fail(err)
	}
	hops := map[netip.Addr]int{}
	for _, route := range routes {
		if err := addNextHops(hops, route.Data, to); err != nil {
			return fail(err)
		}
	}
	return hops, nil
}

// addNextHops adds the next hops of one route (rtnetlink(7), struct rtmsg).
func addNextHops(hops map[netip.Addr]int, route []byte, to netip.Prefix) error {
	if len(route) < routeHeader || binary.NativeEndian.Uint32(route[8:])&unix.RTM_F_CLONED != 0 {
		return nil // a path MTU or a redirect, which ip hides
	}
	if int(route[1]) != to.Bits() || route[4] != unix.RT_TABLE_MAIN {
		return nil
	}
	attributes, err := netlink.NewAttributeDecoder(route[routeHeader:])
	if err != nil {
		return err
	}
	var destination, gateway netip.Addr
	several := map[netip.Addr]int{}
	for attributes.Next() {
		switch attributes.Type() {
		case unix.RTA_DST:
			destination, _ = netip.AddrFromSlice(attributes.Bytes())
		case unix.RTA_GATEWAY:
			gateway, _ = netip.AddrFromSlice(attributes.Bytes())
		case unix.RTA_MULTIPATH:
			attributes.Do(func(list []byte) error { return addMultipath(several, list) })
		}
	}
	if err := attributes.Err(); err != nil || destination != to.Addr() {
		return err
	}
	if gateway.IsValid() {
		several[gateway] = 0
	}
	maps.Copy(hops, several)
	return nil
}

// addMultipath adds each struct rtnexthop of a list: its length, flags, weight less 1, interface and
// attributes.
func addMultipath(hops map[netip.Addr]int, list []byte) error {
	for len(list) >= nextHopHeader {
		length := int(binary.NativeEndian.Uint16(list))
		if length < nextHopHeader || length > len(list) {
			return fmt.Errorf("a next hop of %d bytes in %d", length, len(list))
		}
		attributes, err := netlink.NewAttributeDecoder(list[nextHopHeader:length])
		if err != nil {
			return err
		}
		for attributes.Next() {
			if hop, ok := netip.AddrFromSlice(attributes.Bytes()); ok && attributes.Type() == unix.RTA_GATEWAY {
				hops[hop] = int(list[3]) + 1
			}
		}
		if err := attributes.Err(); err != nil {
			return err
		}
		list = list[min((length+3)&^3, len(list)):]
	}
	return nil
}
