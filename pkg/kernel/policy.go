package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// protocol marks rules and routes of this package; iproute2's rt_protos assigns it to no program.
const protocol = 118

// Priorities of the rules that a Meridio frontend adds, a pair for each VIP.
const (
	meridioPriority          = 100
	meridioBlackholePriority = 101
)

// leftoverBatch bounds the leftover rules that are removed between two reconciliations: the kernel
// searches its list for each. Of 20 000 rules 200 take 0.2 s, all of them 12 s.
const leftoverBatch = 200

// icmpErrors are the ICMP errors about packets to VIPs that leave by the gateways, as type<<8|code:
// a packet that is too big (RFC 792, RFC 4443, which also has the type of each), and one whose hop
// limit ends here. A target that does not answer is not among them: TCP gives up a connection that
// is being opened when a host is unreachable, instead of the retry that finds another target.
var icmpErrors = [...][2]uint16{
	vip.IPv4: {3<<8 | 4, 11 << 8},
	vip.IPv6: {2 << 8, 3 << 8},
}

// policy is the part that acts on the mark: rules and a blackhole route for each family.
type policy struct{ Options }

// rules returns the desired rules in the order in which they are added: while some are missing, VIP
// traffic is dropped rather than sent through another network. ADR 6 says why IPv6 has a third one.
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
		// The kernel looks up the route of an ICMP error without the mark of the packet that it is
		// about, and chooses its source address by that route: a mark in nftables would be too late.
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
	for { // once more after a change
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
			// Replace: a blackhole that another process added is deleted by that process.
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

// missingRules returns the desired rules that are not installed. One that an inconsistent list
// lacks is added again, which changes nothing.
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

// remove removes rules and blackhole routes of this package. Unless all is set those are the ones
// that it added with other options, and the rules of a former Meridio frontend, in batches: new
// VIPs need not wait for ten thousand. It reports whether there are more.
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

// meridio reports whether a rule is `from VIP lookup TABLE`, as a Meridio frontend adds it.
func (p policy) meridio(r rtnetlink.Rule) bool {
	return !r.Extra && r.Input == "" && r.Source.IsValid() && r.Mark == 0 && r.Mask == 0 &&
		r.Action == unix.FR_ACT_TO_TBL &&
		(r.Priority == meridioPriority && r.Table == p.TableID ||
			r.Priority == meridioBlackholePriority && r.Table == p.blackholeTable())
}
