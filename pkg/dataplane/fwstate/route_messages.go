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

// lastMetric is the metric of the blackhole route, which every other route precedes.
const lastMetric = 1<<32 - 1

// policyRule is a rule of policy routing.
type policyRule struct {
	family   vip.Family
	priority uint32
	action   uint8
	table    uint32
	// target is the priority of the target of a goto.
	target     uint32
	mark, mask uint32
	protocol   uint8
	// otherSelectors: the rule has selectors that the fields cannot express, or is inverted.
	otherSelectors bool
}

// commonRules returns the rules that no target owns, in the order of their installation: a
// goto for packets without a fwmark over the rules of targets, to a rule that does nothing. The
// kernel ignores a goto without a target.
func (f *Conn) commonRules(family vip.Family) []policyRule {
	first := uint32(f.config.Priority)
	return []policyRule{
		{family: family, priority: first + 2, action: unix.FR_ACT_NOP, protocol: plan.RouteProtocol},
		{family: family, priority: first, action: unix.FR_ACT_GOTO, target: first + 2, mask: f.config.Mask, protocol: plan.RouteProtocol},
	}
}

// targetPolicyRule returns the rule of a target.
func (f *Conn) targetPolicyRule(family vip.Family, number uint32) policyRule {
	return policyRule{family: family, priority: uint32(f.config.Priority) + 1, action: unix.FR_ACT_TO_TBL, table: number, mark: number, mask: f.config.Mask, protocol: plan.RouteProtocol}
}

// owned reports whether a rule has the protocol number of the data plane and a form of
// commonRules or targetPolicyRule, with any priority and mask. A goto without a target has a
// flag, and therefore otherSelectors.
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

// families returns the families of the kernel.
func (f *Conn) families() []vip.Family {
	if f.noIPv6 {
		return []vip.Family{vip.IPv4}
	}
	return vip.Families[:]
}

func parsePolicyRule(family vip.Family, b []byte) policyRule {
	r := policyRule{family: family, table: uint32(b[4]), action: b[7]}
	// Lengths of source and destination, type of service, flags (inverted, or a goto
	// without a target).
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

// listPolicyRules lists the policy rules of a family. A list of more than one datagram, some
// 400 rules, is resumed by a count: the kernel omits a rule if an earlier one was deleted in
// between, without NLM_F_DUMP_INTR (Linux 6.18). Such a list is valid only if no change of a
// rule was notified during the read.
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

// dumpPolicyRules reads the policy rules of a family, and reports whether all of them came in
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

// retryInterrupted repeats a list that changes of other processes interrupted.
func (f *Conn) retryInterrupted(list func() error) error {
	for attempt := 1; ; attempt++ {
		err := list()
		if !errors.Is(err, nlmsg.ErrInterrupted) || attempt == readAttempts {
			return err
		}
	}
}

// route is a route of any kind.
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
			// Address family (2 bytes) and address.
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

// listRoutes lists the routes of one table, or, with table 0, the data plane's of all tables.
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

// listRoutesOfTables lists the data plane's routes of some tables, and for few tables also
// those of other processes.
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

// putRoute appends a message about a default route of the data plane, or about the blackhole.
func putRoute(m *nlmsg.Messages, kind, flags uint16, r route) {
	scope := byte(unix.RT_SCOPE_UNIVERSE)
	if kind == unix.RTM_DELROUTE {
		scope = unix.RT_SCOPE_NOWHERE // matches any scope
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
		// The default metric of the kernel.
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
