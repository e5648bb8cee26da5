package rtnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// lookupTable is RTM_F_LOOKUP_TABLE: name the table in which the route was found.
const lookupTable = 0x1000

// Route is a route.
type Route struct {
	Family   vip.Family
	Table    uint32
	Prefix   netip.Prefix
	Type     uint8 // unix.RTN_*
	Protocol uint8
	Metric   uint32
	NextHop  netip.Addr // zero: none, or several
	Link     int
	// Dead: the interface is down or has no carrier.
	Dead bool
	// Multipath: the route has several next hops.
	Multipath bool
}

// DefaultPrefix is 0.0.0.0/0 or ::/0.
func DefaultPrefix(f vip.Family) netip.Prefix {
	if f == vip.IPv4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

func (r Route) String() string {
	s := "route to " + r.Prefix.String()
	if r.Type == unix.RTN_BLACKHOLE {
		s = "blackhole " + s
	}
	if r.NextHop.IsValid() {
		s += " via " + r.NextHop.String()
	}
	if r.Metric != 0 {
		s += fmt.Sprintf(" metric %d", r.Metric)
	}
	return s + fmt.Sprintf(" proto %d", r.Protocol)
}

// IsDefault reports whether the route is a default route.
func (r Route) IsDefault() bool { return r.Prefix.Bits() == 0 }

// Drops reports whether the kernel drops packets that the route matches.
func (r Route) Drops() bool {
	return r.Type == unix.RTN_BLACKHOLE || r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_PROHIBIT
}

// Replace returns the request that adds the route in place of one with the same prefix and metric.
func (r Route) Replace() Request {
	return r.request(unix.RTM_NEWROUTE, netlink.Create|netlink.Replace, unix.RT_SCOPE_UNIVERSE)
}

// Delete returns the request that deletes the route. It fails with ESRCH if there is none.
func (r Route) Delete() Request {
	return r.request(unix.RTM_DELROUTE, 0, unix.RT_SCOPE_NOWHERE) // of any scope
}

func (r Route) request(kind netlink.HeaderType, flags netlink.HeaderFlags, scope uint8) Request {
	a := make(attributes, headerLength, 64)
	a[0], a[1], a[5], a[6], a[7] = systemFamily(r.Family), uint8(r.Prefix.Bits()), r.Protocol, scope, r.Type
	a.uint32(unix.RTA_TABLE, r.Table)
	if !r.IsDefault() {
		a.bytes(unix.RTA_DST, r.Prefix.Addr().AsSlice())
	}
	if r.Metric != 0 {
		a.uint32(unix.RTA_PRIORITY, r.Metric)
	}
	if r.NextHop.IsValid() {
		a.bytes(unix.RTA_GATEWAY, r.NextHop.Unmap().AsSlice())
	}
	return Request{Header: netlink.Header{Type: kind, Flags: flags}, Data: a}
}

// ReplaceRoute adds or replaces a route; see Route.Replace.
func (c *Conn) ReplaceRoute(r Route) error {
	if err := c.do(r.Replace()); err != nil {
		return fmt.Errorf("failed to add %s to table %d: %w", r, r.Table, err)
	}
	return nil
}

// DeleteRoute deletes a route if it exists.
func (c *Conn) DeleteRoute(r Route) error {
	if err := c.do(r.Delete()); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("failed to delete %s from table %d: %w", r, r.Table, err)
	}
	return nil
}

// RouteFilter selects routes; zero fields select all. The kernel applies it, so that it does not
// copy a full table that is not asked for.
type RouteFilter struct {
	Table    uint32
	Protocol uint8
}

// Routes lists routes of a family, except those of the kernel's cache.
func (c *Conn) Routes(f vip.Family, filter RouteFilter) ([]Route, error) {
	body := make(attributes, headerLength)
	body[0], body[5] = systemFamily(f), filter.Protocol
	if filter.Table != 0 {
		body.uint32(unix.RTA_TABLE, filter.Table)
	}
	routes, err := list(c.requests, unix.RTM_GETROUTE, body, nil, func(b []byte) (Route, bool, error) {
		r, err := ParseRoute(b)
		return r, err != nil || b[0] == systemFamily(f) && (filter.Table == 0 || r.Table == filter.Table) &&
			(filter.Protocol == 0 || r.Protocol == filter.Protocol), err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // a table that never had a route does not exist
	}
	if err != nil {
		return nil, fmt.Errorf("failed to list %s routes: %w", f, err)
	}
	return routes, nil
}

// Lookup returns the route of a packet to an address with a mark. The kernel's *Error is that of
// the route if the packet would be dropped.
func (c *Conn) Lookup(to netip.Addr, mark uint32) (Route, error) {
	body := make(attributes, headerLength)
	body[0], body[1] = systemFamily(vip.FamilyOf(to)), uint8(to.BitLen())
	if to.Is4() { // for IPv6 the kernel always does, and rejects the flag
		binary.NativeEndian.PutUint32(body[8:], lookupTable)
	}
	body.bytes(unix.RTA_DST, to.AsSlice())
	if mark != 0 {
		body.uint32(unix.RTA_MARK, mark)
	}
	var found Route
	request := netlink.Message{Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request}, Data: body}
	err := c.requests.get(request, func(data []byte) (err error) {
		found, err = ParseRoute(data)
		return err
	})
	if err != nil {
		return Route{}, fmt.Errorf("failed to look up the route to %s with mark %#x: %w", to, mark, err)
	}
	return found, nil
}

// ParseRoute parses the data of RTM_NEWROUTE and RTM_DELROUTE.
func ParseRoute(b []byte) (r Route, err error) {
	dst := netip.Addr{}
	err = decode(b, headerLength, "route", func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.RTA_TABLE:
			r.Table = ad.Uint32()
		case unix.RTA_PRIORITY:
			r.Metric = ad.Uint32()
		case unix.RTA_OIF:
			r.Link = int(ad.Uint32())
		case unix.RTA_GATEWAY:
			r.NextHop, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.RTA_VIA: // a next hop of the other family: two bytes, then its address
			if via := ad.Bytes(); len(via) > 2 {
				r.NextHop, _ = netip.AddrFromSlice(via[2:])
			}
		case unix.RTA_MULTIPATH:
			r.Multipath = true
		case unix.RTA_DST:
			dst, _ = netip.AddrFromSlice(ad.Bytes())
		}
	})
	if err != nil {
		return r, err
	}
	r.Family, _ = familyFrom(b[0])
	if !dst.IsValid() {
		dst = DefaultPrefix(r.Family).Addr()
	}
	r.Prefix, r.Protocol, r.Type = netip.PrefixFrom(dst, int(b[1])), b[5], b[7]
	if r.Table == 0 {
		r.Table = uint32(b[4])
	}
	r.Dead = binary.NativeEndian.Uint32(b[8:])&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) != 0
	return r, nil
}
