package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// netlinkTimeout bounds every exchange with the kernel. A dump of 50 000
// elements takes a tenth of it on a slow machine.
const netlinkTimeout = 5 * time.Second

// protocol marks rules and routes as made by us (`proto 118` in iproute2). The
// number is not assigned to anybody in iproute2's rt_protos.
const protocol = 118

// Layouts of struct fib_rule_hdr and struct rtmsg: 12 bytes each.
const headerLength = 12

// rule is a policy rule as the kernel lists it. What the fields cannot express
// is in exotic.
type rule struct {
	family   vip.Family
	priority uint32
	table    uint32
	mark     uint32
	mask     uint32
	source   netip.Prefix
	protocol uint8
	action   uint8
	// exotic: the rule has another selector, or is inverted.
	exotic bool
}

// same tells whether two rules do the same; who made them does not count.
func (r rule) same(s rule) bool {
	r.protocol, s.protocol = 0, 0
	return r == s
}

func (r rule) String() string {
	s := fmt.Sprintf("%s %d:", r.family, r.priority)
	if r.source.IsValid() {
		s += " from " + r.source.String()
	}
	if r.mark != 0 || r.mask != 0 {
		s += fmt.Sprintf(" fwmark %#x/%#x", r.mark, r.mask)
	}
	switch r.action {
	case unix.FR_ACT_TO_TBL:
		s += fmt.Sprintf(" lookup %d", r.table)
	case unix.FR_ACT_BLACKHOLE:
		s += " blackhole"
	default:
		s += fmt.Sprintf(" action %d", r.action)
	}
	if r.exotic {
		s += " (and more)"
	}
	return s + fmt.Sprintf(" proto %d", r.protocol)
}

// route is a route without its way: only what tells a blackhole of ours from
// anything else.
type route struct {
	family   vip.Family
	table    uint32
	prefix   netip.Prefix
	kind     uint8
	protocol uint8
	metric   uint32
}

func (r route) String() string {
	return fmt.Sprintf("%s %s table %d type %d proto %d metric %d", r.family, r.prefix, r.table, r.kind, r.protocol, r.metric)
}

func (r route) isDefault() bool { return r.prefix.Bits() == 0 }

// dropsTraffic tells whether a packet that meets the route goes nowhere.
func (r route) dropsTraffic() bool {
	return r.kind == unix.RTN_BLACKHOLE || r.kind == unix.RTN_UNREACHABLE || r.kind == unix.RTN_PROHIBIT
}

func systemFamily(f vip.Family) uint8 {
	if f == vip.IPv4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func familyFrom(system uint8) (vip.Family, bool) {
	switch system {
	case unix.AF_INET:
		return vip.IPv4, true
	case unix.AF_INET6:
		return vip.IPv6, true
	}
	return 0, false
}

// anyAddress returns 0.0.0.0/0 or ::/0.
func anyAddress(f vip.Family) netip.Prefix {
	if f == vip.IPv4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// familyAbsent tells whether the kernel has no such family at all (ipv6.disable=1).
func familyAbsent(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// rtnetlink does one exchange on a socket of its own, so that nothing of a
// failed exchange can be taken for the answer to the next one. The socket is in
// the network namespace of the calling thread.
func rtnetlink(m netlink.Message) ([]netlink.Message, error) {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(netlinkTimeout)); err != nil {
		return nil, fmt.Errorf("rtnetlink deadline: %w", err)
	}
	// Without strict checking (before Linux 4.20) the kernel lists more than we
	// asked for; the readers below filter anyway.
	_ = c.SetOption(netlink.GetStrictCheck, true)
	return c.Execute(m)
}

func listRules(f vip.Family) ([]rule, error) {
	header := make([]byte, headerLength)
	header[0] = systemFamily(f)
	msgs, err := rtnetlink(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   header,
	})
	if err != nil {
		return nil, fmt.Errorf("list %s rules: %w", f, err)
	}
	var rules []rule
	for _, m := range msgs {
		r, err := parseRule(m.Data)
		if err != nil {
			return nil, fmt.Errorf("list %s rules: %w", f, err)
		}
		if r.family == f {
			rules = append(rules, r)
		}
	}
	return rules, nil
}

func parseRule(b []byte) (rule, error) {
	if len(b) < headerLength {
		return rule{}, fmt.Errorf("a rule of %d bytes", len(b))
	}
	family, ok := familyFrom(b[0])
	if !ok {
		return rule{}, nil
	}
	r := rule{family: family, table: uint32(b[4]), action: b[7]}
	sourceLength := int(b[2])
	// Destination, type of service, or flags (inverted).
	r.exotic = b[1] != 0 || b[3] != 0 || binary.NativeEndian.Uint32(b[8:]) != 0
	ad, err := netlink.NewAttributeDecoder(b[headerLength:])
	if err != nil {
		return rule{}, err
	}
	for ad.Next() {
		switch ad.Type() {
		case unix.FRA_PRIORITY:
			r.priority = ad.Uint32()
		case unix.FRA_TABLE:
			r.table = ad.Uint32()
		case unix.FRA_FWMARK:
			r.mark = ad.Uint32()
		case unix.FRA_FWMASK:
			r.mask = ad.Uint32()
		case unix.FRA_PROTOCOL:
			r.protocol = ad.Uint8()
		case unix.FRA_SRC:
			if a, ok := netip.AddrFromSlice(ad.Bytes()); ok {
				r.source = netip.PrefixFrom(a, sourceLength)
			}
		case unix.FRA_SUPPRESS_PREFIXLEN:
			r.exotic = r.exotic || ad.Uint32() != 1<<32-1
		default:
			r.exotic = true
		}
	}
	return r, ad.Err()
}

// encodeRule writes a rule that is not exotic.
func encodeRule(r rule) ([]byte, error) {
	header := make([]byte, headerLength)
	header[0], header[7] = systemFamily(r.family), r.action
	ae := netlink.NewAttributeEncoder()
	ae.Uint32(unix.FRA_PRIORITY, r.priority)
	ae.Uint32(unix.FRA_TABLE, r.table)
	ae.Uint8(unix.FRA_PROTOCOL, r.protocol)
	if r.mark != 0 || r.mask != 0 {
		ae.Uint32(unix.FRA_FWMARK, r.mark)
		ae.Uint32(unix.FRA_FWMASK, r.mask)
	}
	if r.source.IsValid() {
		header[2] = uint8(r.source.Bits())
		ae.Bytes(unix.FRA_SRC, r.source.Addr().AsSlice())
	}
	attrs, err := ae.Encode()
	return append(header, attrs...), err
}

func addRule(r rule) error {
	err := changeRule(r, unix.RTM_NEWRULE, netlink.Create|netlink.Excl)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("add rule %s: %w", r, err)
	}
	return nil
}

func deleteRule(r rule) error {
	err := changeRule(r, unix.RTM_DELRULE, 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete rule %s: %w", r, err)
	}
	return nil
}

func changeRule(r rule, kind netlink.HeaderType, flags netlink.HeaderFlags) error {
	data, err := encodeRule(r)
	if err != nil {
		return err
	}
	_, err = rtnetlink(netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | netlink.Acknowledge | flags},
		Data:   data,
	})
	return err
}

// routeFilter narrows a list of routes; zero fields do not. The kernel applies
// it, so that a full table of the gateways is never copied.
type routeFilter struct {
	table    uint32
	protocol uint8
}

func listRoutes(f vip.Family, filter routeFilter) ([]route, error) {
	header := make([]byte, headerLength)
	header[0], header[5] = systemFamily(f), filter.protocol
	if filter.table != 0 {
		ae := netlink.NewAttributeEncoder()
		ae.Uint32(unix.RTA_TABLE, filter.table)
		attrs, err := ae.Encode()
		if err != nil {
			return nil, fmt.Errorf("list %s routes: %w", f, err)
		}
		header = append(header, attrs...)
	}
	msgs, err := rtnetlink(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETROUTE, Flags: netlink.Request | netlink.Dump},
		Data:   header,
	})
	// Strict: a table that never had a route does not exist.
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s routes: %w", f, err)
	}
	var routes []route
	for _, m := range msgs {
		r, err := parseRoute(m.Data)
		if err != nil {
			return nil, fmt.Errorf("list %s routes: %w", f, err)
		}
		if r.family == f && (filter.table == 0 || r.table == filter.table) && (filter.protocol == 0 || r.protocol == filter.protocol) {
			routes = append(routes, r)
		}
	}
	return routes, nil
}

func parseRoute(b []byte) (route, error) {
	if len(b) < headerLength {
		return route{}, fmt.Errorf("a route of %d bytes", len(b))
	}
	family, ok := familyFrom(b[0])
	if !ok {
		return route{}, nil
	}
	r := route{family: family, table: uint32(b[4]), protocol: b[5], kind: b[7]}
	r.prefix = netip.PrefixFrom(anyAddress(family).Addr(), int(b[1]))
	ad, err := netlink.NewAttributeDecoder(b[headerLength:])
	if err != nil {
		return route{}, err
	}
	for ad.Next() {
		switch ad.Type() {
		case unix.RTA_TABLE:
			r.table = ad.Uint32()
		case unix.RTA_PRIORITY:
			r.metric = ad.Uint32()
		case unix.RTA_DST:
			if a, ok := netip.AddrFromSlice(ad.Bytes()); ok {
				r.prefix = netip.PrefixFrom(a, int(b[1]))
			}
		}
	}
	return r, ad.Err()
}

// changeBlackhole adds or deletes the blackhole default of ours in a table.
func changeBlackhole(f vip.Family, table uint32, kind netlink.HeaderType, flags netlink.HeaderFlags) error {
	header := make([]byte, headerLength)
	header[0], header[5], header[7] = systemFamily(f), protocol, unix.RTN_BLACKHOLE
	ae := netlink.NewAttributeEncoder()
	ae.Uint32(unix.RTA_TABLE, table)
	attrs, err := ae.Encode()
	if err != nil {
		return err
	}
	_, err = rtnetlink(netlink.Message{
		Header: netlink.Header{Type: kind, Flags: netlink.Request | netlink.Acknowledge | flags},
		Data:   append(header, attrs...),
	})
	return err
}

func addBlackhole(f vip.Family, table uint32) error {
	// Replace: a blackhole that somebody else made would end with its maker.
	err := changeBlackhole(f, table, unix.RTM_NEWROUTE, netlink.Create|netlink.Replace)
	if err != nil {
		return fmt.Errorf("add %s blackhole default to table %d: %w", f, table, err)
	}
	return nil
}

func deleteBlackhole(f vip.Family, table uint32) error {
	err := changeBlackhole(f, table, unix.RTM_DELROUTE, 0)
	if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete %s blackhole default from table %d: %w", f, table, err)
	}
	return nil
}
