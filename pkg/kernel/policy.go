package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// protocol identifies rules and routes of this package. The number is unassigned in iproute2's
// rt_protos.
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
// traffic is dropped rather than sent through another network. ADR 6 explains the third IPv6
// rule.
func (p policy) rules(f vip.Family) []rtnetlink.Rule {
	r := rtnetlink.Rule{Family: f, Mark: p.Mark, Mask: p.Mask, Protocol: protocol}
	gateways, blackhole, drop := r, r, r
	first, lookup := uint32(p.Priority), uint8(unix.FR_ACT_TO_TBL)
	gateways.Priority, gateways.Action, gateways.Table = first, lookup, p.TableID
	blackhole.Priority, blackhole.Action, blackhole.Table = first+1, lookup, p.blackholeTable()
	drop.Priority, drop.Action = first+2, unix.FR_ACT_BLACKHOLE
	rules := []rtnetlink.Rule{blackhole, gateways}
	if f == vip.IPv6 {
		rules = []rtnetlink.Rule{drop, blackhole, gateways}
	}
	for _, icmp := range icmpErrors[f] {
		// The kernel looks up the route of an ICMP error without the mark of the offending packet, and
		// selects the source address by that route: a mark set by nftables would be too late.
		r := gateways
		r.Mark, r.Mask, r.LocalICMP = 0, 0, icmp
		rules = append(rules, r)
	}
	return rules
}

// ensure installs the blackhole route and the rules of a family and reads them back. It reports
// whether it changed anything.
func (p policy) ensure(f vip.Family) (changed bool, err error) {
	c, err := rtnetlink.Dial()
	if err != nil {
		return false, err
	}
	defer c.Close()
	for { // second iteration: read back after a change
		blackhole, err := p.hasBlackhole(c, f)
		if err != nil {
			return changed, err
		}
		missing, err := p.missingRules(c, f)
		switch {
		case err != nil || blackhole && len(missing) == 0:
			return changed, err
		case changed && !blackhole:
			return true, fmt.Errorf("%s blackhole default route was added to table %d but is missing",
				f, p.blackholeTable())
		case changed:
			return true, fmt.Errorf("rule %s was added but is missing", missing[0])
		}
		if !blackhole {
			r := rtnetlink.Route{
				Family: f, Table: p.blackholeTable(), Prefix: rtnetlink.DefaultPrefix(f),
				Type: unix.RTN_BLACKHOLE, Protocol: protocol,
			}
			// Replace instead of relying on another process's blackhole route, which that process may
			// delete.
			if err := c.Apply(r.Replace()); err != nil {
				return false, err
			}
			p.Log.Info("blackhole default route added", "family", f.String(), "table_id", p.blackholeTable())
		}
		changed = true
		for _, r := range missing {
			if err := c.Apply(r.Add()); err != nil {
				return true, err
			}
			p.Log.Info("policy rule added", "rule", r.String())
		}
	}
}

// missingRules returns the desired rules that are not installed. An interrupted dump may omit an
// installed rule; adding it again has no effect.
func (p policy) missingRules(c *rtnetlink.Conn, f vip.Family) ([]rtnetlink.Rule, error) {
	observed, err := c.Rules(f)
	if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) {
		return nil, err
	}
	return slices.DeleteFunc(p.rules(f), func(d rtnetlink.Rule) bool {
		return slices.ContainsFunc(observed, d.Same)
	}), nil
}

// hasBlackhole reports whether the blackhole route of this package is installed. It fails if its
// table has a route that does not drop traffic.
func (p policy) hasBlackhole(c *rtnetlink.Conn, f vip.Family) (installed bool, err error) {
	table := p.blackholeTable()
	routes, err := c.Routes(f, rtnetlink.RouteFilter{Table: table})
	if err != nil {
		return false, err
	}
	for _, r := range routes {
		if !r.Drops() {
			return false, fmt.Errorf("table %d must contain only a blackhole route, but has the %s %s: "+
				"remove it, or choose another table ID", table, f, r)
		}
		installed = installed || r.IsDefault() && r.Protocol == protocol
	}
	return installed, nil
}

// remove removes rules and blackhole routes of this package. Unless all is set, it removes only
// the ones that were added with other options, and the rules of a former Meridio frontend. It
// then works in batches, so that new VIPs do not wait for the removal of thousands of rules, and
// reports whether more remain.
func (p policy) remove(f vip.Family, all bool) (more bool, err error) {
	c, err := rtnetlink.Dial()
	if err != nil {
		return false, err
	}
	defer c.Close()
	observed, err := c.Rules(f)
	if err != nil {
		return false, err
	}
	observed = slices.DeleteFunc(observed, func(r rtnetlink.Rule) bool {
		switch {
		case slices.ContainsFunc(p.rules(f), r.Same):
			return !all
		case r.Protocol == protocol && !r.Extra:
			return false
		}
		return all || !p.meridio(r)
	})
	more = !all && len(observed) > leftoverBatch
	if more {
		observed = observed[:leftoverBatch]
	}
	var errs []error
	for _, r := range observed {
		errs = append(errs, c.Apply(r.Delete()))
	}
	if len(observed) > 0 {
		p.Log.Info("policy rules removed", "family", f.String(), "rules", len(errs), "more", more)
	}
	if more {
		return true, errors.Join(errs...)
	}
	routes, err := c.Routes(f, rtnetlink.RouteFilter{Protocol: protocol})
	errs = append(errs, err)
	for _, r := range routes {
		if r.Type == unix.RTN_BLACKHOLE && r.IsDefault() && (all || r.Table != p.blackholeTable()) {
			errs = append(errs, c.Apply(r.Delete()))
			p.Log.Info("blackhole default route removed", "family", f.String(), "table_id", r.Table)
		}
	}
	return false, errors.Join(errs...)
}

// meridio reports whether r is a rule `from VIP lookup TABLE` of a Meridio frontend.
func (p policy) meridio(r rtnetlink.Rule) bool {
	return !r.Extra && r.Input == "" && r.Source.IsValid() && r.Mark == 0 && r.Mask == 0 &&
		r.Action == unix.FR_ACT_TO_TBL &&
		(r.Priority == meridioPriority && r.Table == p.TableID ||
			r.Priority == meridioBlackholePriority && r.Table == p.blackholeTable())
}
