package fwstate

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// rtmLength is the size of struct rtmsg and of struct fib_rule_hdr.
const rtmLength = 12

// lastMetric is that of the blackhole, so that any other route comes before it.
const lastMetric = 1<<32 - 1

// policyRule is a rule of policy routing. What the fields cannot express is in
// exotic.
type policyRule struct {
	family   vip.Family
	priority uint32
	action   uint8
	table    uint32
	// target is the priority that a goto leads to.
	target     uint32
	mark, mask uint32
	protocol   uint8
	// otherSelectors: the rule has another selector, or is inverted.
	otherSelectors bool
}

// commonRules are the rules that no target owns, in the order in which they are made:
// packets without a mark of ours jump over the targets' rules to one that does
// nothing. One that leads nowhere yet does nothing either.
func (f *Conn) commonRules(family vip.Family) []policyRule {
	first := uint32(f.config.Priority)
	return []policyRule{
		{family: family, priority: first + 2, action: unix.FR_ACT_NOP, protocol: plan.RouteProtocol},
		{family: family, priority: first, action: unix.FR_ACT_GOTO, target: first + 2, mask: f.config.Mask, protocol: plan.RouteProtocol},
	}
}

// targetPolicyRule is a target's rule.
func (f *Conn) targetPolicyRule(family vip.Family, number uint32) policyRule {
	return policyRule{family: family, priority: uint32(f.config.Priority) + 1, action: unix.FR_ACT_TO_TBL, table: number, mark: number, mask: f.config.Mask, protocol: plan.RouteProtocol}
}

// owned reports whether a rule has our protocol number and one of the forms of
// commonRules and targetPolicy, with any priority and mask. A goto whose target is
// missing has a flag, which makes it exotic.
func (r policyRule) owned() bool {
	switch {
	case r.protocol != plan.RouteProtocol:
		return false
	case r.action == unix.FR_ACT_TO_TBL:
		return !r.otherSelectors && r.mark == r.table && r.mask != 0
	}
	return r.mark == 0 && (r.action == unix.FR_ACT_NOP || r.action == unix.FR_ACT_GOTO)
}

func systemFamily(f vip.Family) byte {
	if f == vip.IPv4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// families are those that the kernel has.
func (f *Conn) families() []vip.Family {
	if f.noIPv6 {
		return []vip.Family{vip.IPv4}
	}
	return vip.Families[:]
}

func parsePolicyRule(family vip.Family, b []byte) policyRule {
	r := policyRule{family: family, table: uint32(b[4]), action: b[7]}
	// Lengths of source and destination, type of service, flags (inverted; that a
	// goto leads nowhere is one, too, and has it not count).
	r.otherSelectors = b[1] != 0 || b[2] != 0 || b[3] != 0 || binary.NativeEndian.Uint32(b[8:]) != 0
	for kind, value := range nlmsg.Attributes(b[rtmLength:]) {
		switch kind {
		case unix.FRA_PRIORITY:
			r.priority = nlmsg.Uint32(value)
		case unix.FRA_TABLE:
			r.table = nlmsg.Uint32(value)
		case unix.FRA_GOTO:
			r.target = nlmsg.Uint32(value)
		case unix.FRA_FWMARK:
			r.mark = nlmsg.Uint32(value)
		case unix.FRA_FWMASK:
			r.mask = nlmsg.Uint32(value)
		case unix.FRA_PROTOCOL:
			r.protocol = value[0]
		case unix.FRA_SUPPRESS_PREFIXLEN:
			r.otherSelectors = r.otherSelectors || nlmsg.Uint32(value) != 1<<32-1
		default:
			r.otherSelectors = true
		}
	}
	return r
}

func putPolicyRule(m *nlmsg.Messages, kind, flags uint16, r policyRule) {
	m.Begin(kind, flags|unix.NLM_F_ACK, systemFamily(r.family), 0, 0, 0, 0, 0, 0, r.action, 0, 0, 0, 0)
	m.Uint32(unix.FRA_PRIORITY, r.priority)
	m.Bytes(unix.FRA_PROTOCOL, []byte{r.protocol})
	if r.action == unix.FR_ACT_TO_TBL {
		m.Uint32(unix.FRA_TABLE, r.table)
	}
	if r.action == unix.FR_ACT_GOTO {
		m.Uint32(unix.FRA_GOTO, r.target)
	}
	if r.mask != 0 {
		m.Uint32(unix.FRA_FWMARK, r.mark)
		m.Uint32(unix.FRA_FWMASK, r.mask)
	}
	m.End()
}

// listPolicyRules lists the policy rules of a family. Of a list that takes more than one
// datagram, some 400 rules, the kernel goes on by counting, so that it leaves one out
// when one before it was deleted meanwhile, and does not say so (Linux 6.18). Such a
// list only counts if no change of a rule was reported while it was read.
func (f *Conn) listPolicyRules(family vip.Family, each func(policyRule)) error {
	for attempt := 1; ; attempt++ {
		var rules []policyRule
		_, err := f.ruleEvents.Drain()
		steady := false
		if err == nil {
			rules, steady, err = f.dumpPolicyRules(family)
		}
		if err == nil && !steady {
			var changed bool
			changed, err = f.ruleEvents.Drain()
			steady = !changed
		}
		if err == nil && !steady && attempt == readAttempts {
			err = nlmsg.ErrInterrupted
		}
		if err != nil {
			return fmt.Errorf("list %s policy rules: %w", family, err)
		}
		if steady {
			for _, r := range rules {
				each(r)
			}
			return nil
		}
	}
}

// dumpPolicyRules reads the policy rules of a family, and tells whether all of them came in
// one datagram.
func (f *Conn) dumpPolicyRules(family vip.Family) (rules []policyRule, whole bool, err error) {
	var m nlmsg.Messages
	m.Begin(unix.RTM_GETRULE, unix.NLM_F_DUMP, systemFamily(family), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	err = f.retryInterrupted(func() error {
		rules, whole = nil, true
		first := -1
		return f.rt.Dump(m.End(), func(data []byte) error {
			if first < 0 {
				first = f.rt.Datagrams
			}
			whole = whole && first == f.rt.Datagrams
			if len(data) >= rtmLength && data[0] == systemFamily(family) {
				rules = append(rules, parsePolicyRule(family, data))
			}
			return nil
		})
	})
	return rules, whole, err
}

// retryInterrupted repeats a list that somebody's changes interrupted. What was handed over
// before is handed over again.
func (f *Conn) retryInterrupted(list func() error) error {
	for attempt := 1; ; attempt++ {
		err := list()
		if !errors.Is(err, nlmsg.ErrInterrupted) || attempt == readAttempts {
			return err
		}
	}
}

// route is a default route, or something else in the table.
type route struct {
	family    vip.Family
	table     uint32
	prefix    netip.Prefix
	kind      uint8
	protocol  uint8
	metric    uint32
	hop       netip.Addr
	link      uint32
	dead      bool
	multipath bool
}

func (r route) String() string {
	s := "route to " + r.prefix.String()
	if r.hop.IsValid() {
		s += " via " + r.hop.String()
	}
	if r.metric != 0 {
		s += fmt.Sprintf(" metric %d", r.metric)
	}
	return s + fmt.Sprintf(" proto %d", r.protocol)
}

func parseRoute(family vip.Family, b []byte) route {
	any := netip.IPv4Unspecified()
	if family == vip.IPv6 {
		any = netip.IPv6Unspecified()
	}
	r := route{family: family, table: uint32(b[4]), protocol: b[5], kind: b[7], prefix: netip.PrefixFrom(any, int(b[1]))}
	r.dead = binary.NativeEndian.Uint32(b[8:])&(unix.RTNH_F_DEAD|unix.RTNH_F_LINKDOWN) != 0
	for kind, value := range nlmsg.Attributes(b[rtmLength:]) {
		switch kind {
		case unix.RTA_TABLE:
			r.table = nlmsg.Uint32(value)
		case unix.RTA_PRIORITY:
			r.metric = nlmsg.Uint32(value)
		case unix.RTA_OIF:
			r.link = nlmsg.Uint32(value)
		case unix.RTA_GATEWAY:
			r.hop, _ = netip.AddrFromSlice(value)
		case unix.RTA_VIA:
			// A family (2 bytes), and an address of it.
			if len(value) > 2 {
				r.hop, _ = netip.AddrFromSlice(value[2:])
			}
		case unix.RTA_MULTIPATH:
			r.multipath = true
		case unix.RTA_DST:
			if a, ok := netip.AddrFromSlice(value); ok {
				r.prefix = netip.PrefixFrom(a, int(b[1]))
			}
		}
	}
	return r
}

// listRoutes lists the routes of one table, or, with table 0, all of ours.
func (f *Conn) listRoutes(family vip.Family, table uint32, each func(route)) error {
	var protocol byte
	if table == 0 {
		protocol = plan.RouteProtocol
	}
	var m nlmsg.Messages
	m.Begin(unix.RTM_GETROUTE, unix.NLM_F_DUMP, systemFamily(family), 0, 0, 0, 0, protocol, 0, 0, 0, 0, 0, 0)
	if table != 0 {
		m.Uint32(unix.RTA_TABLE, table)
	}
	err := f.retryInterrupted(func() error {
		return f.rt.Dump(m.End(), func(data []byte) error {
			if len(data) < rtmLength || data[0] != systemFamily(family) {
				return nil
			}
			if r := parseRoute(family, data); (table == 0 || r.table == table) && (protocol == 0 || r.protocol == protocol) {
				each(r)
			}
			return nil
		})
	})
	// A table that never had a route does not exist.
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list %s routes: %w", family, err)
	}
	return nil
}

// listRoutesOfTables lists routes of some tables: ours, of few tables also those of
// others.
func (f *Conn) listRoutesOfTables(family vip.Family, numbers map[uint32]bool, each func(route)) error {
	if len(numbers) > fewChains {
		return f.listRoutes(family, 0, func(r route) {
			if numbers[r.table] {
				each(r)
			}
		})
	}
	for n := range numbers {
		if err := f.listRoutes(family, n, each); err != nil {
			return err
		}
	}
	return nil
}

// putRoute writes a message about a default route of ours; without a hop it is the
// blackhole.
func putRoute(m *nlmsg.Messages, kind, flags uint16, r route) {
	scope := byte(unix.RT_SCOPE_UNIVERSE)
	if kind == unix.RTM_DELROUTE {
		scope = unix.RT_SCOPE_NOWHERE // any
	}
	m.Begin(kind, flags|unix.NLM_F_ACK, systemFamily(r.family), byte(r.prefix.Bits()), 0, 0, unix.RT_TABLE_UNSPEC, r.protocol, scope, r.kind, 0, 0, 0, 0)
	m.Uint32(unix.RTA_TABLE, r.table)
	if r.prefix.Bits() > 0 {
		m.Bytes(unix.RTA_DST, r.prefix.Addr().AsSlice())
	}
	if r.metric != 0 {
		m.Uint32(unix.RTA_PRIORITY, r.metric)
	}
	if r.hop.IsValid() {
		m.Bytes(unix.RTA_GATEWAY, r.hop.AsSlice())
	}
	m.End()
}

// defaultRoute returns the route of a target.
func defaultRoute(family vip.Family, number uint32, hop netip.Addr) route {
	r := route{family: family, table: number, kind: unix.RTN_UNICAST, protocol: plan.RouteProtocol, prefix: netip.PrefixFrom(netip.IPv4Unspecified(), 0), hop: hop}
	if family == vip.IPv6 {
		// The metric that the kernel would give it.
		r.metric = 1024
	}
	return r
}

func blackhole(family vip.Family, number uint32) route {
	r := defaultRoute(family, number, netip.Addr{})
	r.kind, r.metric = unix.RTN_BLACKHOLE, lastMetric
	return r
}

func (r route) isBlackhole() bool {
	return r.kind == unix.RTN_BLACKHOLE && r.prefix.Bits() == 0 && r.metric == lastMetric
}
