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
func ownedRule(rule rtnetlink.Rule) bool {
	switch {
	case rule.Protocol != plan.RouteProtocol:
		return false
	case rule.Action == unix.FR_ACT_TO_TBL:
		return !rule.Extra && rule.Input == "" && !rule.Source.IsValid() && rule.Mark == rule.Table && rule.Mask != 0
	}
	return rule.Mark == 0 && (rule.Action == unix.FR_ACT_NOP || rule.Action == unix.FR_ACT_GOTO)
}

func defaultRoute(key RouteKey, hop netip.Addr) rtnetlink.Route {
	route := rtnetlink.Route{
		Family: key.Family, Table: key.FWMark, Prefix: rtnetlink.DefaultPrefix(key.Family),
		Type: unix.RTN_UNICAST, Protocol: plan.RouteProtocol, NextHop: hop,
	}
	if key.Family == vip.IPv6 {
		route.Metric = 1024 // the default of the kernel
	}
	return route
}

func blackhole(key RouteKey) rtnetlink.Route {
	route := defaultRoute(key, netip.Addr{})
	route.Type, route.Metric = unix.RTN_BLACKHOLE, lastMetric
	return route
}

func isBlackhole(route rtnetlink.Route) bool {
	return route.Type == unix.RTN_BLACKHOLE && route.IsDefault() && route.Metric == lastMetric
}

// RouteKey identifies the rule and routes of a target in one family. FWMark 0: the common rules.
type RouteKey struct {
	FWMark uint32
	Family vip.Family
}

// RouteErrors maps targets and families to failures.
type RouteErrors map[RouteKey]error

// Err joins the failures, sorted by fwmark.
func (e RouteErrors) Err() error {
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(e), func(a, b RouteKey) int {
		return cmp.Or(cmp.Compare(a.FWMark, b.FWMark), cmp.Compare(a.Family, b.Family))
	}) {
		errs = append(errs, e[key])
	}
	return errors.Join(errs...)
}

func (e RouteErrors) add(key RouteKey, err error) { e[key] = errors.Join(e[key], err) }

type routeBatch []routeRequest

type routeRequest struct {
	rtnetlink.Request
	key RouteKey
	hop netip.Addr // of a route to add
}

func (batch *routeBatch) add(key RouteKey, request rtnetlink.Request) {
	*batch = append(*batch, routeRequest{Request: request, key: key})
}

func (routing *Routing) execute(batch routeBatch) RouteErrors {
	failed := RouteErrors{}
	requests := make([]rtnetlink.Request, len(batch))
	for index, request := range batch {
		requests[index] = request.Request
	}
	rejected, err := routing.rt.Do(requests...)
	for index, request := range batch {
		switch {
		case err != nil:
			// The kernel may have executed a part of the batch, so every request counts as failed.
			failed[request.key] = err
		case rejected[index] == nil:
		case request.hop.IsValid() && unconnected(rejected[index]):
			failed.add(request.key, fmt.Errorf("%s is on no connected network: %w", request.hop, rejected[index]))
		default:
			failed.add(request.key, rejected[index])
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
	var batch routeBatch
	for _, family := range routing.families {
		for _, rule := range routing.commonRules(family) {
			batch.add(RouteKey{Family: family}, rule.Add())
		}
	}
	return routing.execute(batch)
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
	var batch routeBatch
	// A failure of one target must not prevent the routes of the rest.
	for _, target := range targets {
		for _, family := range vip.Families {
			key, hop := RouteKey{target.FWMark, family}, target.NextHops[family].Unmap()
			if e := common[RouteKey{Family: family}]; e != nil {
				failed.add(key, e)
			}
			switch {
			case err != nil:
				failed.add(key, err)
			case slices.Contains(routing.families, family):
				routing.addTargetRoutes(&batch, key, hop, have[target.FWMark])
				// An IPv6 next hop without IPv6 in the kernel is a mistake of the configuration, not a fault.
			case hop.IsValid():
				failed.add(key, fmt.Errorf("%s cannot be reached: the kernel has no IPv6", hop))
			}
		}
	}
	for key, err := range routing.execute(batch) {
		failed.add(key, err)
	}
	return failed
}

func fwmarksOf(targets []plan.KernelTarget) []uint32 {
	fwmarks := make([]uint32, len(targets))
	for index, target := range targets {
		fwmarks[index] = target.FWMark
	}
	return fwmarks
}

// addTargetRoutes adds the missing rule and routes of one target in one family. The order of the
// requests ensures that packets in between are dropped, not sent to a wrong target.
func (routing *Routing) addTargetRoutes(batch *routeBatch, key RouteKey, hop netip.Addr, have *routeTable) {
	if !hop.IsValid() {
		routing.removeTargetRoutes(batch, key, have)
		return
	}
	want := defaultRoute(key, hop)
	dropped, found := false, false
	var wrong []rtnetlink.Route
	for _, route := range have.routes[key.Family] {
		same := route
		// The kernel selects the link of the next hop; the desired route contains none.
		same.Link = 0
		switch {
		case route.Protocol != plan.RouteProtocol:
		case isBlackhole(route):
			dropped = true
		case same == want:
			found = true
		default:
			wrong = append(wrong, route)
		}
	}
	// The blackhole route is first: packets are dropped until the next hop is installed.
	if !dropped {
		batch.add(key, blackhole(key).Replace())
	}
	// Remove wrong routes before adding the correct one, so that no packet uses them.
	for _, route := range wrong {
		batch.add(key, route.Delete())
	}
	if !found {
		*batch = append(*batch, routeRequest{want.Replace(), key, hop})
	}
	// The rule is last, because it directs packets to the table.
	if !have.rules[key.Family] {
		batch.add(key, routing.targetPolicyRule(key).Add())
	}
}

func (routing *Routing) removeTargetRoutes(batch *routeBatch, key RouteKey, have *routeTable) {
	if have.rules[key.Family] || !have.rulesRead {
		batch.add(key, routing.targetPolicyRule(key).Delete())
	}
	for _, route := range have.routes[key.Family] {
		if route.Protocol == plan.RouteProtocol {
			batch.add(key, route.Delete())
		}
	}
}

// RemoveRoutes removes the data plane's rules and routes of these fwmarks.
func (routing *Routing) RemoveRoutes(fwmarks []uint32) error {
	have, err := routing.readTables(fwmarks, len(fwmarks) > fewChains)
	if err != nil {
		return err
	}
	var batch routeBatch
	for _, fwmark := range fwmarks {
		for _, family := range routing.families {
			routing.removeTargetRoutes(&batch, RouteKey{fwmark, family}, have[fwmark])
		}
	}
	return routing.execute(batch).Err()
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
	for _, fwmark := range fwmarks {
		tables[fwmark] = &routeTable{rulesRead: withRules}
	}
	if len(fwmarks) == 0 {
		return tables, nil
	}
	if withRules {
		rules, err := routing.rules()
		if err != nil {
			return nil, err
		}
		for _, entry := range rules {
			own := routing.targetPolicyRule(RouteKey{entry.Table, entry.Family})
			if table := tables[entry.Table]; table != nil && entry == own {
				table.rules[entry.Family] = true
			}
		}
	}
	// For many tables a single dump lists only the data plane's routes. For few tables, one dump
	// per table also lists routes of other processes.
	filters := []rtnetlink.RouteFilter{{Protocol: plan.RouteProtocol}}
	if len(tables) <= fewChains {
		filters = nil
		for fwmark := range tables {
			filters = append(filters, rtnetlink.RouteFilter{Table: fwmark})
		}
	}
	// Routes of other tables are skipped: older kernels ignore the filter.
	for _, filter := range filters {
		routes, err := routing.routes(filter)
		if err != nil {
			return nil, err
		}
		for _, entry := range routes {
			if table := tables[entry.Table]; table != nil {
				table.routes[entry.Family] = append(table.routes[entry.Family], entry)
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

func (table *routeTable) copyTo(target *plan.KernelTarget) {
	target.Rules = table.rules
	for _, family := range vip.Families {
		var routes []rtnetlink.Route
		for _, route := range table.routes[family] {
			switch {
			case route.Protocol != plan.RouteProtocol || !route.IsDefault():
			case isBlackhole(route):
				target.Blackhole[family] = true
			default:
				routes = append(routes, route)
			}
		}
		// Several, dead and multipath routes count as a missing next hop, so that they are replaced.
		if len(routes) == 1 && routes[0].Type == unix.RTN_UNICAST && !routes[0].Dead && !routes[0].Multipath {
			target.NextHops[family] = routes[0].NextHop
		}
	}
}

// ReadRoutes reads the rules and routes of these fwmarks. The result contains every fwmark.
func (routing *Routing) ReadRoutes(fwmarks []uint32) (map[uint32]*plan.KernelTarget, error) {
	targets := make(map[uint32]*plan.KernelTarget, len(fwmarks))
	for _, fwmark := range fwmarks {
		targets[fwmark] = &plan.KernelTarget{FWMark: fwmark}
	}
	return targets, routing.addRoutesTo(targets, fwmarks)
}

// addRoutesTo adds rules and routes to targets, and targets that have only rules or routes.
func (routing *Routing) addRoutesTo(targets map[uint32]*plan.KernelTarget, fwmarks []uint32) error {
	tables, err := routing.readTables(fwmarks, true)
	for fwmark, table := range tables {
		if targets[fwmark] == nil {
			if table.rules == [len(vip.Families)]bool{} && len(table.routes[vip.IPv4])+len(table.routes[vip.IPv6]) == 0 {
				continue
			}
			targets[fwmark] = &plan.KernelTarget{FWMark: fwmark}
		}
		table.copyTo(targets[fwmark])
	}
	return err
}

func (routing *Routing) commonRulesInstalled() (bool, error) {
	rules, err := routing.rules()
	if err != nil {
		return false, err
	}
	for _, family := range routing.families {
		for _, rule := range routing.commonRules(family) {
			if !slices.Contains(rules, rule) {
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
	for _, entry := range rules {
		if ownedRule(entry) && entry.Action == unix.FR_ACT_TO_TBL {
			owned[entry.Table] = true
		}
	}
	for _, entry := range routes {
		if isBlackhole(entry) || routing.config.inRange(entry.Table) {
			owned[entry.Table] = true
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
	routing.foreign = slices.DeleteFunc(rules,
		func(rule rtnetlink.Rule) bool { return rule.Protocol == plan.RouteProtocol })
	routing.foreignAt, routing.foreignListed = changes, true
	return routing.foreign, nil
}

// UsedByOthers maps the fwmarks that another process uses in a rule or as a table to the use.
func (routing *Routing) UsedByOthers(fwmarks []uint32) (map[uint32]string, error) {
	uses := map[uint32]string{}
	rules, err := routing.rulesOfOthers()
	if err != nil {
		return nil, err
	}
	for _, entry := range rules {
		if entry.Action == unix.FR_ACT_TO_TBL && slices.Contains(fwmarks, entry.Table) {
			uses[entry.Table] = "there is the rule " + entry.String()
		}
		// Only a rule that matches all bits of the fwmark is a conflict.
		mark := entry.Mark & routing.config.Mask
		if entry.Mask&routing.config.Mask == routing.config.Mask && slices.Contains(fwmarks, mark) {
			uses[mark] = "there is the rule " + entry.String()
		}
	}
	for _, fwmark := range fwmarks {
		routes, err := routing.routes(rtnetlink.RouteFilter{Table: fwmark})
		if err != nil {
			return nil, err
		}
		for _, entry := range routes {
			if entry.Protocol != plan.RouteProtocol {
				uses[fwmark] = "there is the " + entry.String()
			}
		}
	}
	return uses, nil
}

// removeRules removes the data plane's policy rules, with any options, unless keep returns true.
func (routing *Routing) removeRules(keep func(rtnetlink.Rule) bool) error {
	rules, err := routing.rules()
	if err != nil {
		return err
	}
	// The kernel lists rules by priority, so the goto is removed before its target. A goto without a
	// target would remain unresolved.
	var batch routeBatch
	for _, rule := range rules {
		if ownedRule(rule) && !keep(rule) {
			batch.add(RouteKey{rule.Table, rule.Family}, rule.Delete())
		}
	}
	return routing.execute(batch).Err()
}

// RemoveOldRules removes policy rules that an earlier process installed with different options.
func (routing *Routing) RemoveOldRules() error {
	return routing.removeRules(func(rule rtnetlink.Rule) bool {
		// Nearly all rules are target rules: compare with the target rule first.
		return rule == routing.targetPolicyRule(RouteKey{rule.Table, rule.Family}) ||
			slices.Contains(routing.commonRules(rule.Family), rule)
	})
}

// conflicts reports whether a rule of another process has a priority between the data plane's goto
// and its target. The frontend uses priorities 100 and 101 by default.
func (routing *Routing) conflicts(rule rtnetlink.Rule) bool {
	first := uint32(routing.config.Priority)
	return rule.Protocol != plan.RouteProtocol && (rule.Priority == first || rule.Priority == first+1)
}
