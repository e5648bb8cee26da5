package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// protocol identifies rules and routes of this package. It is unassigned in iproute2's rt_protos.
const protocol = 118

// Priorities of the rules that a Meridio frontend adds, a pair for each VIP.
const (
	meridioPriority          = 100
	meridioBlackholePriority = 101
)

// leftoverBatch bounds the leftover rules that are removed between two reconciliations: the
// kernel searches its rule list for each deletion. With 20 000 rules, deleting 200 takes 0.2 s
// and deleting all 12 s.
const leftoverBatch = 200

// icmpErrors lists the ICMP errors about packets to VIPs that leave by the gateways, as
// type<<8|code: packet too big and time exceeded (RFC 792, RFC 4443). Host unreachable is
// excluded: it would make TCP abort a connection attempt instead of retrying, and the retry may
// reach another target.
var icmpErrors = [...][2]uint16{
	vip.IPv4: {3<<8 | 4, 11 << 8},
	vip.IPv6: {2 << 8, 3 << 8},
}

// policy manages the policy rules and the blackhole route of each family.
type policy struct{ Options }

// rules returns the desired rules in the order of their installation: while some are missing, VIP
// traffic is dropped rather than sent through another network. ADR 6 explains the third IPv6 rule.
func (policy policy) rules(family vip.Family) []rtnetlink.Rule {
	rule := rtnetlink.Rule{Family: family, Mark: policy.Mark, Mask: policy.Mask, Protocol: protocol}
	gateways, blackhole, drop := rule, rule, rule
	first, lookup := uint32(policy.Priority), uint8(unix.FR_ACT_TO_TBL)
	gateways.Priority, gateways.Action, gateways.Table = first, lookup, policy.TableID
	blackhole.Priority, blackhole.Action, blackhole.Table = first+1, lookup, policy.blackholeTable()
	drop.Priority, drop.Action = first+2, unix.FR_ACT_BLACKHOLE
	rules := []rtnetlink.Rule{blackhole, gateways}
	if family == vip.IPv6 {
		rules = []rtnetlink.Rule{drop, blackhole, gateways}
	}
	for _, icmp := range icmpErrors[family] {
		// The kernel looks up the route of an ICMP error without the mark of the offending packet, and
		// selects the source address by that route: a mark set by nftables would be too late.
		rule := gateways
		rule.Mark, rule.Mask, rule.LocalICMP = 0, 0, icmp
		rules = append(rules, rule)
	}
	return rules
}

// ensure installs the blackhole route and the rules of a family and reads them back. It reports
// whether it changed anything.
func (policy policy) ensure(family vip.Family) (changed bool, err error) {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	for attempt := 0; ; attempt++ { // later iterations: read back after a change
		blackhole, err := policy.hasBlackhole(conn, family)
		if err != nil {
			return changed, err
		}
		missing, err := policy.missingRules(conn, family)
		switch {
		case err != nil || blackhole && len(missing) == 0:
			return changed, err
		case changed && !blackhole:
			return true, fmt.Errorf("%s blackhole default route was added to table %d but is missing",
				family, policy.blackholeTable())
		case attempt == readAttempts:
			return changed, fmt.Errorf("rule %s was added but is missing", missing[0])
		}
		if !blackhole {
			entry := rtnetlink.Route{
				Family: family, Table: policy.blackholeTable(), Prefix: rtnetlink.DefaultPrefix(family),
				Type: unix.RTN_BLACKHOLE, Protocol: protocol,
			}
			// Replace instead of relying on another process's blackhole route, which it may delete.
			if err := conn.Apply(entry.Replace()); err != nil {
				return false, err
			}
			policy.Log.Info("blackhole default route added", "family", family.String(), "table_id", policy.blackholeTable())
		}
		added, err := policy.add(conn, missing)
		if changed = changed || added || !blackhole; err != nil {
			return changed, err
		}
	}
}

// add adds rules, and reports whether one did not exist.
func (policy policy) add(conn *rtnetlink.Conn, rules []rtnetlink.Rule) (added bool, err error) {
	for _, entry := range rules {
		request := entry.Add()
		request.Satisfied = nil
		err := conn.Apply(request)
		if err == nil {
			added = true
			policy.Log.Info("policy rule added", "rule", entry.String())
		} else if !errors.Is(err, unix.EEXIST) {
			return added, err
		}
	}
	return added, nil
}

// missingRules returns the desired rules that a list lacks. While other processes change many
// rules, as lb does with the targets of a stream, it may lack an installed one, also without error.
func (policy policy) missingRules(conn *rtnetlink.Conn, family vip.Family) ([]rtnetlink.Rule, error) {
	observed, err := conn.Rules(family)
	if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) {
		return nil, err
	}
	return slices.DeleteFunc(policy.rules(family), func(desired rtnetlink.Rule) bool {
		return slices.ContainsFunc(observed, desired.Same)
	}), nil
}

// hasBlackhole reports whether the blackhole route of this package is installed. It fails if its
// table has a route that does not drop traffic.
func (policy policy) hasBlackhole(conn *rtnetlink.Conn, family vip.Family) (installed bool, err error) {
	table := policy.blackholeTable()
	routes, err := conn.Routes(family, rtnetlink.RouteFilter{Table: table})
	if err != nil {
		return false, err
	}
	for _, route := range routes {
		if !route.Drops() {
			return false, fmt.Errorf("table %d must contain only a blackhole route, but has the %s %s: "+
				"remove it, or choose another table ID", table, family, route)
		}
		installed = installed || route.IsDefault() && route.Protocol == protocol
	}
	return installed, nil
}

// remove removes rules and blackhole routes of this package. Unless all is set, it removes only
// the ones that were added with other options, and the rules of a former Meridio frontend. It
// then works in batches, so that new VIPs do not wait for the removal of thousands of rules, and
// reports whether more remain.
func (policy policy) remove(family vip.Family, all bool) (more bool, err error) {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	observed, err := conn.Rules(family)
	if err != nil {
		return false, err
	}
	// The rules that remain in observed are removed from the kernel.
	observed = slices.DeleteFunc(observed, func(entry rtnetlink.Rule) bool {
		switch {
		case slices.ContainsFunc(policy.rules(family), entry.Same):
			return !all
		case entry.Protocol == protocol && !entry.Extra:
			return false
		}
		return all || !policy.meridio(entry)
	})
	// The kernel searches its rule list for each deletion.
	more = !all && len(observed) > leftoverBatch
	// The last batch removes the routes, after the rules that look them up.
	if more {
		observed = observed[:leftoverBatch]
	}
	var errs []error
	for _, entry := range observed {
		errs = append(errs, conn.Apply(entry.Delete()))
	}
	if len(observed) > 0 {
		policy.Log.Info("policy rules removed", "family", family.String(), "rules", len(errs), "more", more)
	}
	if more {
		return true, errors.Join(errs...)
	}
	routes, err := conn.Routes(family, rtnetlink.RouteFilter{Protocol: protocol})
	errs = append(errs, err)
	for _, entry := range routes {
		if entry.Type == unix.RTN_BLACKHOLE && entry.IsDefault() && (all || entry.Table != policy.blackholeTable()) {
			errs = append(errs, conn.Apply(entry.Delete()))
			policy.Log.Info("blackhole default route removed", "family", family.String(), "table_id", entry.Table)
		}
	}
	return false, errors.Join(errs...)
}

// meridio reports whether r is a rule `from VIP lookup TABLE` of a Meridio frontend.
func (policy policy) meridio(rule rtnetlink.Rule) bool {
	return !rule.Extra && rule.Input == "" && rule.Source.IsValid() && rule.Mark == 0 && rule.Mask == 0 &&
		rule.Action == unix.FR_ACT_TO_TBL &&
		(rule.Priority == meridioPriority && rule.Table == policy.TableID ||
			rule.Priority == meridioBlackholePriority && rule.Table == policy.blackholeTable())
}
