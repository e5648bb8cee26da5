package fwstate

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// lastMetric is the metric of the blackhole route, so that every other route precedes it.
const lastMetric = 1<<32 - 1

// commonRules returns the common policy rules in the order of installation: the no-op target of
// the goto, and the goto by which packets without a fwmark skip the rules of targets. The kernel
// ignores a goto without a target.
func (routing *Routing) commonRules(family vip.Family) []rtnetlink.Rule {
	first := uint32(routing.config.Priority)
	return []rtnetlink.Rule{
		{Family: family, Priority: first + 2, Action: unix.FR_ACT_NOP, Protocol: plan.RouteProtocol},
		{
			Family: family, Priority: first, Action: unix.FR_ACT_GOTO, Goto: first + 2, Mask: routing.config.Mask,
			Protocol: plan.RouteProtocol,
		},
	}
}

func (routing *Routing) targetPolicyRule(key RouteKey) rtnetlink.Rule {
	return rtnetlink.Rule{
		Family: key.Family, Priority: uint32(routing.config.Priority) + 1, Mark: key.FWMark, Mask: routing.config.Mask,
		Action: unix.FR_ACT_TO_TBL, Table: key.FWMark, Protocol: plan.RouteProtocol,
	}
}

// ownedRule reports whether a rule has the data plane's protocol number and the form of
// commonRules or targetPolicyRule, with any priority and mask. It does not test Extra of a goto,
// which the kernel flags if the target is missing.
func ownedRule(r rtnetlink.Rule) bool {
	switch {
	case r.Protocol != plan.RouteProtocol:
		return false
	case r.Action == unix.FR_ACT_TO_TBL:
		return !r.Extra && r.Input == "" && !r.Source.IsValid() && r.Mark == r.Table && r.Mask != 0
	}
	return r.Mark == 0 && (r.Action == unix.FR_ACT_NOP || r.Action == unix.FR_ACT_GOTO)
}

func defaultRoute(key RouteKey, hop netip.Addr) rtnetlink.Route {
	r := rtnetlink.Route{
		Family: key.Family, Table: key.FWMark, Prefix: rtnetlink.DefaultPrefix(key.Family),
		Type: unix.RTN_UNICAST, Protocol: plan.RouteProtocol, NextHop: hop,
	}
	if key.Family == vip.IPv6 {
		r.Metric = 1024 // the default of the kernel
	}
	return r
}

func blackhole(key RouteKey) rtnetlink.Route {
	r := defaultRoute(key, netip.Addr{})
	r.Type, r.Metric = unix.RTN_BLACKHOLE, lastMetric
	return r
}

func isBlackhole(r rtnetlink.Route) bool {
	return r.Type == unix.RTN_BLACKHOLE && r.IsDefault() && r.Metric == lastMetric
}

// RouteKey identifies the rule and routes of a target in one family. FWMark 0 identifies the
// common rules.
type RouteKey struct {
	FWMark uint32
	Family vip.Family
}

// RouteErrors maps targets and families to failures.
type RouteErrors map[RouteKey]error

// Err joins the failures, sorted by fwmark.
func (e RouteErrors) Err() error {
	var errs []error
	for _, k := range slices.SortedFunc(maps.Keys(e), func(a, b RouteKey) int {
		return cmp.Or(cmp.Compare(a.FWMark, b.FWMark), cmp.Compare(a.Family, b.Family))
	}) {
		errs = append(errs, e[k])
	}
	return errors.Join(errs...)
}

func (e RouteErrors) add(key RouteKey, err error) { e[key] = errors.Join(e[key], err) }

// routeBatch is a list of requests for rules and routes of targets.
type routeBatch []routeRequest

type routeRequest struct {
	rtnetlink.Request
	key RouteKey
	hop netip.Addr // of a route to add
}

func (b *routeBatch) add(key RouteKey, r rtnetlink.Request) {
	*b = append(*b, routeRequest{Request: r, key: key})
}

func (routing *Routing) execute(b routeBatch) RouteErrors {
	failed := RouteErrors{}
	requests := make([]rtnetlink.Request, len(b))
	for i, r := range b {
		requests[i] = r.Request
	}
	rejected, err := routing.rt.Do(requests...)
	for i, r := range b {
		switch {
		case err != nil:
			failed[r.key] = err
		case rejected[i] == nil:
		case r.hop.IsValid() && unconnected(rejected[i]):
			failed.add(r.key, fmt.Errorf("%s is on no connected network: %w", r.hop, rejected[i]))
		default:
			failed.add(r.key, rejected[i])
		}
	}
	return failed
}

// unconnected reports whether the kernel rejected a next hop that is not on a connected network.
func unconnected(err error) bool {
	return slices.ContainsFunc([]unix.Errno{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.ENETDOWN, unix.EINVAL, unix.ENODEV},
		func(e unix.Errno) bool { return errors.Is(err, e) })
}

// AddCommonRules installs the common policy rules.
func (routing *Routing) AddCommonRules() RouteErrors {
	var b routeBatch
	for _, family := range routing.families {
		for _, r := range routing.commonRules(family) {
			b.add(RouteKey{Family: family}, r.Add())
		}
	}
	return routing.execute(b)
}

// AddRoutes installs the rules and routes of targets in the families with a next hop. It removes
// the data plane's rules and routes in families without a next hop, and routes to a wrong next
// hop. With withCommon it also installs the common rules, which takes 0.2 ms among 1 000 targets
// even if they exist. A failure concerns one target and one family.
func (routing *Routing) AddRoutes(targets []plan.KernelTarget, withCommon bool) RouteErrors {
	failed, common := RouteErrors{}, RouteErrors{}
	if withCommon {
		common = routing.AddCommonRules()
	}
	have, err := routing.readTables(fwmarksOf(targets), len(targets) > fewChains)
	var b routeBatch
	for _, t := range targets {
		for _, family := range vip.Families {
			key, hop := RouteKey{t.FWMark, family}, t.NextHops[family].Unmap()
			if e := common[RouteKey{Family: family}]; e != nil {
				failed.add(key, e)
			}
			switch {
			case err != nil:
				failed.add(key, err)
			case slices.Contains(routing.families, family):
				routing.addTargetRoutes(&b, key, hop, have[t.FWMark])
			case hop.IsValid():
				failed.add(key, fmt.Errorf("%s cannot be reached: the kernel has no IPv6", hop))
			}
		}
	}
	for key, err := range routing.execute(b) {
		failed.add(key, err)
	}
	return failed
}

func fwmarksOf(targets []plan.KernelTarget) []uint32 {
	fwmarks := make([]uint32, len(targets))
	for i, t := range targets {
		fwmarks[i] = t.FWMark
	}
	return fwmarks
}

// addTargetRoutes adds the missing rule and routes of one target in one family. The order of the
// requests ensures that packets in between are dropped, not sent to a wrong target.
func (routing *Routing) addTargetRoutes(b *routeBatch, key RouteKey, hop netip.Addr, have *routeTable) {
	if !hop.IsValid() {
		routing.removeTargetRoutes(b, key, have)
		return
	}
	want := defaultRoute(key, hop)
	dropped, found := false, false
	var wrong []rtnetlink.Route
	for _, r := range have.routes[key.Family] {
		same := r
		same.Link = 0
		switch {
		case r.Protocol != plan.RouteProtocol:
		case isBlackhole(r):
			dropped = true
		case same == want:
			found = true
		default:
			wrong = append(wrong, r)
		}
	}
	if !dropped {
		b.add(key, blackhole(key).Replace())
	}
	// Remove wrong routes before adding the correct one, so that no packet uses them.
	for _, r := range wrong {
		b.add(key, r.Delete())
	}
	if !found {
		*b = append(*b, routeRequest{want.Replace(), key, hop})
	}
	if !have.rules[key.Family] {
		b.add(key, routing.targetPolicyRule(key).Add())
	}
}

func (routing *Routing) removeTargetRoutes(b *routeBatch, key RouteKey, have *routeTable) {
	if have.rules[key.Family] || !have.rulesRead {
		b.add(key, routing.targetPolicyRule(key).Delete())
	}
	for _, r := range have.routes[key.Family] {
		if r.Protocol == plan.RouteProtocol {
			b.add(key, r.Delete())
		}
	}
}

// RemoveRoutes removes the data plane's rules and routes of these fwmarks.
func (routing *Routing) RemoveRoutes(fwmarks []uint32) error {
	have, err := routing.readTables(fwmarks, len(fwmarks) > fewChains)
	if err != nil {
		return err
	}
	var b routeBatch
	for _, n := range fwmarks {
		for _, family := range routing.families {
			routing.removeTargetRoutes(&b, RouteKey{n, family}, have[n])
		}
	}
	return routing.execute(b).Err()
}

type routeTable struct {
	// rulesRead: rules was read. The kernel cannot filter a rule dump, so for few targets removing
	// a rule without a read is faster.
	rulesRead bool
	rules     [len(vip.Families)]bool
	routes    [len(vip.Families)][]rtnetlink.Route
}

// readTables reads the routes of fwmarks, and their rules if withRules is set.
func (routing *Routing) readTables(fwmarks []uint32, withRules bool) (map[uint32]*routeTable, error) {
	tables := make(map[uint32]*routeTable, len(fwmarks))
	for _, n := range fwmarks {
		tables[n] = &routeTable{rulesRead: withRules}
	}
	if len(fwmarks) == 0 {
		return tables, nil
	}
	if withRules {
		rules, err := routing.rules()
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			if t := tables[r.Table]; t != nil && r == routing.targetPolicyRule(RouteKey{r.Table, r.Family}) {
				t.rules[r.Family] = true
			}
		}
	}
	// For many tables a single dump lists only the data plane's routes. For few tables, one dump
	// per table also lists routes of other processes.
	filters := []rtnetlink.RouteFilter{{Protocol: plan.RouteProtocol}}
	if len(tables) <= fewChains {
		filters = nil
		for n := range tables {
			filters = append(filters, rtnetlink.RouteFilter{Table: n})
		}
	}
	for _, filter := range filters {
		routes, err := routing.routes(filter)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			if t := tables[r.Table]; t != nil {
				t.routes[r.Family] = append(t.routes[r.Family], r)
			}
		}
	}
	return tables, nil
}

// inFamilies concatenates the lists of all supported families.
func inFamilies[T any](routing *Routing, list func(vip.Family) ([]T, error)) (all []T, err error) {
	for _, family := range routing.families {
		some, err := list(family)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func (routing *Routing) rules() ([]rtnetlink.Rule, error) {
	return inFamilies(routing, routing.rt.Rules)
}

func (routing *Routing) routes(filter rtnetlink.RouteFilter) ([]rtnetlink.Route, error) {
	return inFamilies(routing, func(family vip.Family) ([]rtnetlink.Route, error) {
		return routing.rt.Routes(family, filter)
	})
}

func (t *routeTable) copyTo(to *plan.KernelTarget) {
	to.Rules = t.rules
	for _, family := range vip.Families {
		var routes []rtnetlink.Route
		for _, r := range t.routes[family] {
			switch {
			case r.Protocol != plan.RouteProtocol || !r.IsDefault():
			case isBlackhole(r):
				to.Blackhole[family] = true
			default:
				routes = append(routes, r)
			}
		}
		if len(routes) == 1 && routes[0].Type == unix.RTN_UNICAST && !routes[0].Dead && !routes[0].Multipath {
			to.NextHops[family] = routes[0].NextHop
		}
	}
}

// ReadRoutes reads the rules and routes of these fwmarks. The result contains every fwmark.
func (routing *Routing) ReadRoutes(fwmarks []uint32) (map[uint32]*plan.KernelTarget, error) {
	targets := make(map[uint32]*plan.KernelTarget, len(fwmarks))
	for _, n := range fwmarks {
		targets[n] = &plan.KernelTarget{FWMark: n}
	}
	return targets, routing.addRoutesTo(targets, fwmarks)
}

// addRoutesTo adds rules and routes to targets. It also adds targets that have only rules or
// routes.
func (routing *Routing) addRoutesTo(targets map[uint32]*plan.KernelTarget, fwmarks []uint32) error {
	tables, err := routing.readTables(fwmarks, true)
	for n, t := range tables {
		if targets[n] == nil {
			if t.rules == [len(vip.Families)]bool{} && len(t.routes[vip.IPv4])+len(t.routes[vip.IPv6]) == 0 {
				continue
			}
			targets[n] = &plan.KernelTarget{FWMark: n}
		}
		t.copyTo(targets[n])
	}
	return err
}

func (routing *Routing) commonRulesInstalled() (bool, error) {
	rules, err := routing.rules()
	if err != nil {
		return false, err
	}
	for _, family := range routing.families {
		for _, r := range routing.commonRules(family) {
			if !slices.Contains(rules, r) {
				return false, nil
			}
		}
	}
	return true, nil
}

// OwnedTables returns the tables of the data plane's rules and routes. A table with routes outside
// the configured range is included only with the data plane's blackhole route, because another
// process may use the protocol number.
func (routing *Routing) OwnedTables() ([]uint32, error) {
	rules, err := routing.rules()
	if err != nil {
		return nil, err
	}
	routes, err := routing.routes(rtnetlink.RouteFilter{Protocol: plan.RouteProtocol})
	if err != nil {
		return nil, err
	}
	owned := map[uint32]bool{}
	for _, r := range rules {
		if ownedRule(r) && r.Action == unix.FR_ACT_TO_TBL {
			owned[r.Table] = true
		}
	}
	for _, r := range routes {
		if isBlackhole(r) || routing.config.inRange(r.Table) {
			owned[r.Table] = true
		}
	}
	return slices.Sorted(maps.Keys(owned)), nil
}

// rulesOfOthers returns the policy rules of other processes. The kernel cannot filter a rule dump,
// so the result is cached until another process changes a rule.
func (routing *Routing) rulesOfOthers() ([]rtnetlink.Rule, error) {
	// Read the counter first: a change during the dump then invalidates the cache.
	changes, err := routing.rt.ForeignRuleChanges()
	if err != nil || routing.foreignListed && changes == routing.foreignAt {
		return routing.foreign, err
	}
	rules, err := routing.rules()
	if err != nil {
		return nil, err
	}
	routing.foreign = slices.DeleteFunc(rules, func(r rtnetlink.Rule) bool { return r.Protocol == plan.RouteProtocol })
	routing.foreignAt, routing.foreignListed = changes, true
	return routing.foreign, nil
}

// UsedByOthers maps the fwmarks that another process uses in a rule or as a table to the use.
func (routing *Routing) UsedByOthers(fwmarks []uint32) (map[uint32]string, error) {
	by := map[uint32]string{}
	rules, err := routing.rulesOfOthers()
	if err != nil {
		return nil, err
	}
	for _, r := range rules {
		if r.Action == unix.FR_ACT_TO_TBL && slices.Contains(fwmarks, r.Table) {
			by[r.Table] = "there is the rule " + r.String()
		}
		// Only a rule that matches all bits of the fwmark is a conflict.
		mark := r.Mark & routing.config.Mask
		if r.Mask&routing.config.Mask == routing.config.Mask && slices.Contains(fwmarks, mark) {
			by[mark] = "there is the rule " + r.String()
		}
	}
	for _, n := range fwmarks {
		routes, err := routing.routes(rtnetlink.RouteFilter{Table: n})
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			if r.Protocol != plan.RouteProtocol {
				by[n] = "there is the " + r.String()
			}
		}
	}
	return by, nil
}

// removeRules removes the data plane's policy rules, regardless of their options, unless keep
// returns true.
func (routing *Routing) removeRules(keep func(rtnetlink.Rule) bool) error {
	rules, err := routing.rules()
	if err != nil {
		return err
	}
	// The kernel lists rules by priority, so the goto is removed before its target. A goto without a
	// target would remain unresolved.
	var b routeBatch
	for _, r := range rules {
		if ownedRule(r) && !keep(r) {
			b.add(RouteKey{r.Table, r.Family}, r.Delete())
		}
	}
	return routing.execute(b).Err()
}

// RemoveOldRules removes policy rules that an earlier process installed with different options.
func (routing *Routing) RemoveOldRules() error {
	return routing.removeRules(func(r rtnetlink.Rule) bool {
		// Nearly all rules are target rules: compare with the target rule first.
		return r == routing.targetPolicyRule(RouteKey{r.Table, r.Family}) || slices.Contains(routing.commonRules(r.Family), r)
	})
}

// conflicts reports whether a rule of another process has a priority between the data plane's goto
// and its target. The frontend uses priorities 100 and 101 by default.
func (routing *Routing) conflicts(r rtnetlink.Rule) bool {
	first := uint32(routing.config.Priority)
	return r.Protocol != plan.RouteProtocol && (r.Priority == first || r.Priority == first+1)
}
