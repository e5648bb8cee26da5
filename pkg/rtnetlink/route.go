package rtnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
)

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
	// OnLink: the next hop is on the link, even if no connected prefix contains it.
	OnLink bool
	// Dead: the interface is down or has no carrier.
	Dead bool
	// Multipath: the route has several next hops.
	Multipath bool
}

// ProtocolTarget marks the rules and routes of the target program. The value is unassigned in
// iproute2's rt_protos.
const ProtocolTarget = 180

// DefaultPrefix is 0.0.0.0/0 or ::/0.
func DefaultPrefix(f vip.Family) netip.Prefix {
	return netip.PrefixFrom([...]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[f], 0)
}

// SourceToward returns the source address that the kernel selects for packets to an address.
func SourceToward(to netip.Addr) (netip.Addr, error) {
	const discard = 9 // a port of UDP, to which connect(2) sends nothing
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, discard)))
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	local, _ := conn.LocalAddr().(*net.UDPAddr)
	return local.AddrPort().Addr().Unmap(), nil
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
	return s + fmt.Sprintf(" table %d proto %d", r.Table, r.Protocol)
}

// IsDefault reports whether the route is a default route.
func (r Route) IsDefault() bool { return r.Prefix.Bits() == 0 }

// Drops reports whether the kernel drops packets that the route matches.
func (r Route) Drops() bool {
	return r.Type == unix.RTN_BLACKHOLE || r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_PROHIBIT
}

// Replace returns the request that adds the route or replaces one of the same prefix and metric.
func (r Route) Replace() Request {
	q := Request{operation: "add", Satisfied: exists}
	scope := uint8(unix.RT_SCOPE_UNIVERSE)
	if r.Type == unix.RTN_LOCAL {
		scope = unix.RT_SCOPE_HOST
	}
	return r.request(q, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, scope)
}

// Delete returns the request that deletes the route.
func (r Route) Delete() Request {
	// RT_SCOPE_NOWHERE matches any scope.
	return r.request(Request{operation: "delete", Satisfied: absent}, unix.RTM_DELROUTE, 0, unix.RT_SCOPE_NOWHERE)
}

func (r Route) request(q Request, kind, flags uint16, scope uint8) Request {
	q.object = r
	header := [headerLength]byte{
		systemFamilies[r.Family], uint8(r.Prefix.Bits()), 0, 0, unix.RT_TABLE_UNSPEC, r.Protocol, scope, r.Type,
	}
	if r.OnLink {
		binary.NativeEndian.PutUint32(header[8:], unix.RTNH_F_ONLINK)
	}
	q.Begin(kind, flags|unix.NLM_F_ACK, header[:]...)
	q.Uint32(unix.RTA_TABLE, r.Table)
	if !r.IsDefault() {
		q.Bytes(unix.RTA_DST, r.Prefix.Addr().AsSlice())
	}
	if r.Metric != 0 {
		q.Uint32(unix.RTA_PRIORITY, r.Metric)
	}
	if r.NextHop.IsValid() {
		q.Bytes(unix.RTA_GATEWAY, r.NextHop.Unmap().AsSlice())
	}
	// The kernel lists IPv6 routes that drop packets with the loopback interface, but a deletion
	// with that interface does not match them.
	if r.Link != 0 && !r.Drops() {
		q.Uint32(unix.RTA_OIF, uint32(r.Link))
	}
	return q
}

// RouteFilter selects routes; zero fields match all. The kernel applies the filter, so it does not
// copy a full table of unwanted routes.
type RouteFilter struct {
	Table    uint32
	Protocol uint8
}

// Routes lists the routes of a family, without cached routes.
func (c *Conn) Routes(f vip.Family, filter RouteFilter) ([]Route, error) {
	header := [headerLength]byte{0: systemFamilies[f], 5: filter.Protocol}
	request := dump(unix.RTM_GETROUTE, header[:])
	if filter.Table != 0 {
		request.Uint32(unix.RTA_TABLE, filter.Table)
	}
	routes, err := list(c, f.String()+" routes", request, ParseRoute, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // a table that never had a route does not exist
	}
	// Before Linux 4.20 the kernel ignores the filter.
	return slices.DeleteFunc(routes, func(r Route) bool {
		return filter.Table != 0 && r.Table != filter.Table || filter.Protocol != 0 && r.Protocol != filter.Protocol
	}), err
}

// Lookup returns the route of a locally generated packet with a fwmark. For a packet that would be
// dropped it returns the error of the route type as an *nlmsg.Error.
func (c *Conn) Lookup(to netip.Addr, mark uint32) (Route, error) {
	header := [headerLength]byte{0: systemFamilies[vip.FamilyOf(to)], 1: uint8(to.BitLen())}
	if to.Is4() { // for IPv6 the kernel always names the table, and rejects the flag
		binary.NativeEndian.PutUint32(header[8:], unix.RTM_F_LOOKUP_TABLE)
	}
	var m nlmsg.Messages
	m.Begin(unix.RTM_GETROUTE, 0, header[:]...)
	m.Bytes(unix.RTA_DST, to.AsSlice())
	if mark != 0 {
		m.Uint32(unix.RTA_MARK, mark)
	}
	data, err := c.requests.Get(&m)
	if err != nil {
		return Route{}, fmt.Errorf("failed to look up the route to %s with mark %#x: %w", to, mark, err)
	}
	return ParseRoute(data)
}

// LookupForwarded returns the route of a packet with a fwmark that arrives on an interface. For a
// packet that would be dropped it returns an *nlmsg.Error: the error of the route type, or EXDEV
// from reverse path filtering.
func (c *Conn) LookupForwarded(from, to netip.Addr, link int, mark uint32) (Route, error) {
	header := [headerLength]byte{
		0: systemFamilies[vip.FamilyOf(to)], 1: uint8(to.BitLen()), 2: uint8(from.BitLen()),
	}
	flags := uint32(unix.RTM_F_FIB_MATCH) // the entry of the table, with its protocol
	if to.Is4() {
		flags |= unix.RTM_F_LOOKUP_TABLE
	}
	binary.NativeEndian.PutUint32(header[8:], flags)
	var m nlmsg.Messages
	m.Begin(unix.RTM_GETROUTE, 0, header[:]...)
	m.Bytes(unix.RTA_DST, to.AsSlice())
	m.Bytes(unix.RTA_SRC, from.AsSlice())
	m.Uint32(unix.RTA_IIF, uint32(link))
	m.Uint32(unix.RTA_MARK, mark)
	data, err := c.requests.Get(&m)
	if err != nil {
		return Route{}, fmt.Errorf("failed to look up the route from %s to %s with mark %#x that arrives on interface %d: %w",
			from, to, mark, link, err)
	}
	return ParseRoute(data)
}

// ParseRoute parses the data of RTM_NEWROUTE and RTM_DELROUTE.
func ParseRoute(b []byte) (Route, error) {
	attributes, err := attributes(b, headerLength, "route")
	if err != nil {
		return Route{}, err
	}
	r := Route{Table: uint32(b[4]), Protocol: b[5], Type: b[7]}
	r.Family, _ = familyFrom(b[0])
	r.Prefix = netip.PrefixFrom(DefaultPrefix(r.Family).Addr(), int(b[1]))
	flags := binary.NativeEndian.Uint32(b[8:])
	r.Dead, r.OnLink = flags&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) != 0, flags&unix.RTNH_F_ONLINK != 0
	for kind, value := range attributes.All() {
		switch kind {
		case unix.RTA_TABLE:
			r.Table = value.Uint32()
		case unix.RTA_PRIORITY:
			r.Metric = value.Uint32()
		case unix.RTA_OIF:
			r.Link = int(value.Uint32())
		case unix.RTA_GATEWAY:
			r.NextHop = value.Addr()
		case unix.RTA_VIA: // a next hop of the other family: two bytes, then its address
			r.NextHop = value[min(2, len(value)):].Addr()
		case unix.RTA_MULTIPATH:
			r.Multipath = true
		case unix.RTA_DST:
			r.Prefix = netip.PrefixFrom(value.Addr(), int(b[1]))
		}
	}
	return r, nil
}
