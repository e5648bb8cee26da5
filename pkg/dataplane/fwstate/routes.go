package fwstate

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/nlmsg"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// routeBatch gathers rtnetlink messages with the target and the operation of each.
type routeBatch struct {
	nlmsg.Messages
	keys []RouteKey
	// ignored are errors that mean that the desired state exists.
	ignored    []unix.Errno
	operations []string
	hops       []netip.Addr
}

// RouteKey is one family of the rule and the routes of a target; FWMark 0 is that of the
// common rules.
type RouteKey struct {
	FWMark uint32
	Family vip.Family
}

// RouteErrors are failures by target and family.
type RouteErrors map[RouteKey]error

// Err joins the failures in the order of fwmarks.
func (w RouteErrors) Err() error {
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(w), func(a, b RouteKey) int {
		return cmp.Or(cmp.Compare(a.FWMark, b.FWMark), cmp.Compare(a.Family, b.Family))
	}) {
		errs = append(errs, w[k])
	}
	return errors.Join(errs...)
}

func (a *routeBatch) add(key RouteKey, fine unix.Errno, what string, hop netip.Addr) {
	a.keys, a.ignored, a.operations, a.hops = append(a.keys, key), append(a.ignored, fine), append(a.operations, what), append(a.hops, hop)
}

// execute sends a batch and returns the failures.
func (f *Conn) execute(a *routeBatch) RouteErrors {
	failed := RouteErrors{}
	refused, err := f.rt.Exchange(&a.Messages)
	if err != nil {
		for _, k := range a.keys {
			failed[k] = err
		}
		return failed
	}
	for i, err := range refused {
		if errors.Is(err, a.ignored[i]) {
			continue
		}
		if hop := a.hops[i]; hop.IsValid() && unconnected(err) {
			err = fmt.Errorf("%s is on no connected network: %w", hop, err)
		}
		failed[a.keys[i]] = errors.Join(failed[a.keys[i]], fmt.Errorf("%s: %w", a.operations[i], err))
	}
	return failed
}

// unconnected reports whether the kernel refused a gateway because it is on no connected network.
func unconnected(err error) bool {
	for _, errno := range []unix.Errno{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.ENETDOWN, unix.EINVAL, unix.ENODEV} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// AddCommonRules installs the policy rules that no target owns.
func (f *Conn) AddCommonRules() RouteErrors {
	var a routeBatch
	for _, family := range f.families() {
		for _, r := range f.commonRules(family) {
			putPolicyRule(&a.Messages, unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r)
			a.add(RouteKey{Family: family}, unix.EEXIST, fmt.Sprintf("add %s policy rule of priority %d", family, r.priority), netip.Addr{})
		}
	}
	return f.execute(&a)
}

// AddRoutes installs the rules and the routes of targets, in the families with a next hop, and
// removes those of the data plane in other families or to other next hops. A failure concerns
// one target and one family.
func (f *Conn) AddRoutes(slots []plan.KernelTarget) RouteErrors {
	failed := RouteErrors{}
	numbers := make([]uint32, 0, len(slots))
	for _, s := range slots {
		numbers = append(numbers, s.FWMark)
	}
	for key, err := range f.AddCommonRules() {
		for _, n := range numbers {
			failed[RouteKey{n, key.Family}] = err
		}
	}
	have, err := f.readTables(numbers, len(numbers) > fewChains)
	if err != nil {
		for _, n := range numbers {
			for _, family := range vip.Families {
				failed[RouteKey{n, family}] = err
			}
		}
		return failed
	}
	var a routeBatch
	for _, s := range slots {
		for _, family := range vip.Families {
			hop := s.NextHops[family].Unmap()
			if family == vip.IPv6 && f.noIPv6 {
				if hop.IsValid() {
					failed[RouteKey{s.FWMark, family}] = fmt.Errorf("%s cannot be reached: the kernel has no IPv6", hop)
				}
				continue
			}
			f.addTargetRoutes(&a, s.FWMark, family, hop, have[s.FWMark])
		}
	}
	for key, err := range f.execute(&a) {
		failed[key] = errors.Join(failed[key], err)
	}
	return failed
}

// addTargetRoutes adds what one target lacks in one family. The order ensures that packets are
// dropped in between rather than sent to another target.
func (f *Conn) addTargetRoutes(a *routeBatch, number uint32, family vip.Family, hop netip.Addr, have *routeTable) {
	if !hop.IsValid() {
		f.removeTargetRoutes(a, number, family, have)
		return
	}
	hole, way := blackhole(family, number), defaultRoute(family, number, hop)
	found := false
	var wrong []route
	for _, r := range have.routes[family] {
		switch {
		case r.protocol != plan.RouteProtocol:
		case r.isBlackhole():
			hole = route{}
		case r.kind == way.kind && r.prefix.Bits() == 0 && r.metric == way.metric && r.hop == hop && !r.dead && !r.multipath:
			found = true
		default:
			wrong = append(wrong, r)
		}
	}
	if hole.kind != 0 {
		putRoute(&a.Messages, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, hole)
		a.add(RouteKey{number, family}, unix.EEXIST, fmt.Sprintf("add %s blackhole default to table %d", family, number), netip.Addr{})
	}
	// Wrong routes go before the right one is added: no packet follows them any more.
	for _, r := range wrong {
		putRoute(&a.Messages, unix.RTM_DELROUTE, 0, r)
		a.add(RouteKey{number, family}, unix.ESRCH, fmt.Sprintf("delete %s %s from table %d", family, r, number), netip.Addr{})
	}
	if !found {
		putRoute(&a.Messages, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, way)
		a.add(RouteKey{number, family}, unix.EEXIST, fmt.Sprintf("add %s default route to table %d", family, number), hop)
	}
	if !have.rules[family] {
		putPolicyRule(&a.Messages, unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, f.targetPolicyRule(family, number))
		a.add(RouteKey{number, family}, unix.EEXIST, fmt.Sprintf("add %s rule fwmark %d", family, number), netip.Addr{})
	}
}

// removeTargetRoutes removes the rule and the routes of one target in one family.
func (f *Conn) removeTargetRoutes(a *routeBatch, number uint32, family vip.Family, have *routeTable) {
	if have.rules[family] || !have.rulesRead {
		putPolicyRule(&a.Messages, unix.RTM_DELRULE, 0, f.targetPolicyRule(family, number))
		a.add(RouteKey{number, family}, unix.ENOENT, fmt.Sprintf("delete %s rule fwmark %d", family, number), netip.Addr{})
	}
	for _, r := range have.routes[family] {
		if r.protocol == plan.RouteProtocol {
			putRoute(&a.Messages, unix.RTM_DELROUTE, 0, r)
			a.add(RouteKey{number, family}, unix.ESRCH, fmt.Sprintf("delete %s %s from table %d", family, r, number), netip.Addr{})
		}
	}
}

// RemoveRoutes removes the data plane's rules and routes of these fwmarks.
func (f *Conn) RemoveRoutes(numbers []uint32) error {
	have, err := f.readTables(numbers, len(numbers) > fewChains)
	if err != nil {
		return err
	}
	var a routeBatch
	for _, n := range numbers {
		for _, family := range f.families() {
			f.removeTargetRoutes(&a, n, family, have[n])
		}
	}
	return f.execute(&a).Err()
}

// routeTable has the rules and routes of one fwmark.
type routeTable struct {
	// rulesRead: rules was read. The kernel lists all rules or none, so that for few targets
	// it is faster to remove a rule without a read.
	rulesRead bool
	rules     [len(vip.Families)]bool
	routes    [len(vip.Families)][]route
}

// readTables reads the routes of fwmarks, and their rules if known is set.
func (f *Conn) readTables(numbers []uint32, known bool) (map[uint32]*routeTable, error) {
	ways, set := make(map[uint32]*routeTable, len(numbers)), make(map[uint32]bool, len(numbers))
	for _, n := range numbers {
		ways[n], set[n] = &routeTable{rulesRead: known}, true
	}
	if len(numbers) == 0 {
		return ways, nil
	}
	for _, family := range f.families() {
		if known {
			if err := f.listPolicyRules(family, func(r policyRule) {
				if w := ways[r.table]; w != nil && r == f.targetPolicyRule(family, r.table) {
					w.rules[family] = true
				}
			}); err != nil {
				return nil, err
			}
		}
		if err := f.listRoutesOfTables(family, set, func(r route) {
			routes := &ways[r.table].routes[family]
			if !slices.Contains(*routes, r) {
				*routes = append(*routes, r)
			}
		}); err != nil {
			return nil, err
		}
	}
	return ways, nil
}

// copyTo copies rules and routes to a target.
func (w *routeTable) copyTo(s *plan.KernelTarget) {
	s.Rules = w.rules
	for _, family := range vip.Families {
		var ways []route
		for _, r := range w.routes[family] {
			switch {
			case r.protocol != plan.RouteProtocol || r.prefix.Bits() != 0:
			case r.isBlackhole():
				s.Blackhole[family] = true
			default:
				ways = append(ways, r)
			}
		}
		if len(ways) == 1 && ways[0].kind == unix.RTN_UNICAST && !ways[0].dead && !ways[0].multipath {
			s.NextHops[family] = ways[0].hop
		}
	}
}

// ReadRoutes reads the rules and routes of these fwmarks. The result has all of them.
func (f *Conn) ReadRoutes(numbers []uint32) (map[uint32]*plan.KernelTarget, error) {
	ways, err := f.readTables(numbers, true)
	if err != nil {
		return nil, err
	}
	slots := make(map[uint32]*plan.KernelTarget, len(ways))
	for n, w := range ways {
		slots[n] = &plan.KernelTarget{FWMark: n}
		w.copyTo(slots[n])
	}
	return slots, nil
}

// readAllRoutes adds rules and routes to targets, and targets of which only those exist. It
// reports whether the common rules are installed.
func (f *Conn) readAllRoutes(numbers []uint32, slots map[uint32]*plan.KernelTarget) (common bool, err error) {
	ways, err := f.readTables(numbers, true)
	if err != nil {
		return false, err
	}
	for n, w := range ways {
		s := slots[n]
		if s == nil {
			s = &plan.KernelTarget{FWMark: n}
		}
		w.copyTo(s)
		if s.Rules != [len(vip.Families)]bool{} || len(w.routes[vip.IPv4]) > 0 || len(w.routes[vip.IPv6]) > 0 {
			slots[n] = s
		}
	}
	return f.commonRulesInstalled()
}

// commonRulesInstalled reports whether all common rules are installed.
func (f *Conn) commonRulesInstalled() (bool, error) {
	stand := true
	for _, family := range f.families() {
		missing := f.commonRules(family)
		if err := f.listPolicyRules(family, func(r policyRule) {
			missing = slices.DeleteFunc(missing, func(w policyRule) bool { return w == r })
		}); err != nil {
			return false, err
		}
		stand = stand && len(missing) == 0
	}
	return stand, nil
}

// OwnedTables returns the tables of the data plane's rules and routes. A table outside of the
// configured range counts only with a blackhole of the data plane: another process may use
// the protocol number.
func (f *Conn) OwnedTables() ([]uint32, error) {
	set := map[uint32]bool{}
	for _, family := range f.families() {
		if err := f.listPolicyRules(family, func(r policyRule) {
			if r.owned() && r.action == unix.FR_ACT_TO_TBL {
				set[r.table] = true
			}
		}); err != nil {
			return nil, err
		}
		if err := f.listRoutes(family, 0, func(r route) {
			if r.isBlackhole() || r.table >= f.config.First && r.table <= f.config.Mask {
				set[r.table] = true
			}
		}); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(set)), nil
}

// UsedByOthers returns which of these fwmarks another process uses as a routing table or in a
// rule, and how.
func (f *Conn) UsedByOthers(numbers []uint32) (map[uint32]string, error) {
	by, set := map[uint32]string{}, make(map[uint32]bool, len(numbers))
	for _, n := range numbers {
		set[n] = true
	}
	for _, family := range f.families() {
		if err := f.listPolicyRules(family, func(r policyRule) {
			if r.protocol == plan.RouteProtocol {
				return
			}
			if r.action == unix.FR_ACT_TO_TBL && set[r.table] {
				by[r.table] = fmt.Sprintf("%s rule %d (proto %d) leads to table %d", family, r.priority, r.protocol, r.table)
			}
			// Only rules for the whole fwmark: rules for some of its bits are no conflict.
			if r.mask&f.config.Mask == f.config.Mask && set[r.mark&f.config.Mask] {
				by[r.mark&f.config.Mask] = fmt.Sprintf("%s rule %d (proto %d) matches the mark %d", family, r.priority, r.protocol, r.mark)
			}
		}); err != nil {
			return nil, err
		}
		for _, n := range numbers {
			if err := f.listRoutes(family, n, func(r route) {
				if r.protocol != plan.RouteProtocol {
					by[n] = fmt.Sprintf("table %d has the %s", n, r)
				}
			}); err != nil {
				return nil, err
			}
		}
	}
	return by, nil
}

// documentationAddress returns an address that is never local (RFC 5737, RFC 3849).
func documentationAddress(f vip.Family) netip.Addr {
	if f == vip.IPv4 {
		return netip.AddrFrom4([4]byte{192, 0, 2, 1})
	}
	return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 1})
}

// lookupTable is RTM_F_LOOKUP_TABLE: the answer names the table of the route.
const lookupTable = 0x1000

// ResolveNextHop returns the next hop of a packet with a fwmark, by a route lookup in the
// kernel: the result of all rules and routes. It is invalid if the packet is dropped or uses
// the table of another fwmark.
func (f *Conn) ResolveNextHop(number uint32, family vip.Family) (netip.Addr, error) {
	if family == vip.IPv6 && f.noIPv6 {
		return netip.Addr{}, nil
	}
	r, err := f.lookupRoute(family, number)
	if err != nil || r == nil || r.table != number || r.kind != unix.RTN_UNICAST {
		return netip.Addr{}, err
	}
	return r.hop, nil
}

// lookupRoute looks up the route of a packet with a fwmark; nil if it is dropped.
func (f *Conn) lookupRoute(family vip.Family, mark uint32) (*route, error) {
	var m nlmsg.Messages
	far := documentationAddress(family)
	header := [rtmLength]byte{0: systemFamily(family), 1: byte(far.BitLen())}
	if family == vip.IPv4 { // IPv6 always returns the table, and rejects the flag
		binary.NativeEndian.PutUint32(header[8:], lookupTable)
	}
	m.Begin(unix.RTM_GETROUTE, 0, header[:]...)
	m.Bytes(unix.RTA_DST, far.AsSlice())
	m.Uint32(unix.RTA_MARK, mark)
	data, err := f.rt.Get(m.End())
	var refusal *nlmsg.KernelError
	if errors.As(err, &refusal) {
		switch refusal.Errno {
		case unix.EINVAL, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EACCES, unix.ENETDOWN:
			return nil, nil // blackhole, unreachable, no route, prohibit
		}
	}
	if err != nil {
		return nil, fmt.Errorf("look up the %s route of fwmark %d: %w", family, mark, err)
	}
	if len(data) < rtmLength {
		return nil, nil
	}
	r := parseRoute(family, data)
	return &r, nil
}
