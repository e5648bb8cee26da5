package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// protocol marks rules and routes of this package (`proto 118` in iproute2). iproute2's rt_protos
// assigns the number to no program.
const protocol = 118

// Priorities of the rules that a Meridio frontend adds, a pair for each VIP.
const (
	meridioPriority          = 100
	meridioBlackholePriority = 101
)

// leftoverBatch bounds the leftover rules that are removed between two reconciliations. The kernel
// searches its list for each: of 20 000 rules, two for each of 10 000 VIPs, 200 take 0.2 s at
// first, all of them 12 s.
const leftoverBatch = 200

// policy is the part that acts on the mark: rules and a blackhole route for each family.
type policy struct {
	o   Options
	log *slog.Logger
}

// rules returns the desired rules in the order in which they are added: while some are missing, VIP
// traffic is dropped rather than sent through another network.
//
// IPv6 needs a third rule, which drops by itself. The kernel binds an IPv6 blackhole route to the
// loopback interface, so that a socket bound to another interface bypasses it (seen on Linux 6.18:
// packets of such a socket left through the primary network); the route also vanishes when lo goes
// down.
func (p policy) rules(f vip.Family) []rtnetlink.Rule {
	r := rtnetlink.Rule{Family: f, Mark: p.o.Mark, Mask: p.o.Mask, Protocol: protocol}
	gateways, blackhole, drop := r, r, r
	gateways.Priority, gateways.Action, gateways.Table = uint32(p.o.Priority), unix.FR_ACT_TO_TBL, p.o.TableID
	blackhole.Priority, blackhole.Action, blackhole.Table = uint32(p.o.Priority)+1, unix.FR_ACT_TO_TBL, p.o.blackholeTable()
	drop.Priority, drop.Action = uint32(p.o.Priority)+2, unix.FR_ACT_BLACKHOLE
	if f == vip.IPv6 {
		return []rtnetlink.Rule{drop, blackhole, gateways}
	}
	return []rtnetlink.Rule{blackhole, gateways}
}

// blackhole returns the default route that drops VIP traffic for which there is no gateway.
func (p policy) blackhole(f vip.Family) rtnetlink.Route {
	return rtnetlink.Route{
		Family: f, Table: p.o.blackholeTable(), Prefix: rtnetlink.DefaultPrefix(f), Type: unix.RTN_BLACKHOLE, Protocol: protocol,
	}
}

// ensure installs the blackhole route and the rules of a family and reads them back. It reports
// whether it changed anything.
func (p policy) ensure(f vip.Family) (changed bool, err error) {
	c, err := rtnetlink.Dial()
	if err != nil {
		return false, err
	}
	defer c.Close()
	if changed, err = p.ensureBlackhole(c, f); err != nil {
		return changed, err
	}
	observed, err := c.Rules(f)
	// A rule that an inconsistent list lacks is added again, which changes nothing.
	if err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) {
		return changed, err
	}
	missing := missingRules(observed, p.rules(f))
	if len(missing) == 0 {
		return changed, nil
	}
	for _, r := range missing {
		if err := c.AddRule(r); err != nil {
			return true, err
		}
		p.log.Info("policy rule added", "rule", r.String())
	}
	if observed, err = c.Rules(f); err != nil && !errors.Is(err, rtnetlink.ErrInterrupted) {
		return true, err
	}
	if missing := missingRules(observed, p.rules(f)); len(missing) > 0 {
		return true, fmt.Errorf("rule %s was added but is missing", missing[0])
	}
	return true, nil
}

func (p policy) ensureBlackhole(c *rtnetlink.Conn, f vip.Family) (changed bool, err error) {
	if ok, err := p.hasBlackhole(c, f); ok || err != nil {
		return false, err
	}
	// Replace: a blackhole that another process added is deleted by that process.
	if err := c.ReplaceRoute(p.blackhole(f)); err != nil {
		return false, err
	}
	p.log.Info("blackhole default route added", "family", f.String(), "table_id", p.o.blackholeTable())
	ok, err := p.hasBlackhole(c, f)
	if err == nil && !ok {
		err = fmt.Errorf("%s blackhole default route was added to table %d but is missing", f, p.o.blackholeTable())
	}
	return true, err
}

// hasBlackhole reports whether the blackhole route of this package is installed. It fails if its
// table has a route that does not drop traffic.
func (p policy) hasBlackhole(c *rtnetlink.Conn, f vip.Family) (installed bool, err error) {
	table := p.o.blackholeTable()
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

// removeLeftovers removes rules and blackhole routes that this package added with other options,
// and the rules of a former Meridio frontend, now that the desired ones are installed. It removes a
// batch, so that new VIPs need not wait for ten thousand rules, and reports whether there are more.
func (p policy) removeLeftovers(f vip.Family) (more bool, err error) {
	c, err := rtnetlink.Dial()
	if err != nil {
		return false, err
	}
	defer c.Close()
	observed, err := c.Rules(f)
	if err != nil {
		return false, err
	}
	removed := 0
	for _, r := range observed {
		outdated := r.Protocol == protocol && !r.Extra && len(missingRules(p.rules(f), []rtnetlink.Rule{r})) > 0
		if !outdated && !p.meridio(r) {
			continue
		}
		if removed == leftoverBatch {
			p.log.Info("leftover policy rules removed, more to come", "family", f.String(), "rules", removed)
			return true, nil
		}
		if err := c.DeleteRule(r); err != nil {
			return false, err
		}
		removed++
		p.log.Debug("leftover policy rule removed", "rule", r.String())
	}
	if removed > 0 {
		p.log.Info("leftover policy rules removed", "family", f.String(), "rules", removed)
	}
	routes, err := c.Routes(f, rtnetlink.RouteFilter{Protocol: protocol})
	if err != nil {
		return false, err
	}
	for _, r := range routes {
		if r.Table == p.o.blackholeTable() || r.Type != unix.RTN_BLACKHOLE || !r.IsDefault() {
			continue
		}
		if err := c.DeleteRoute(r); err != nil {
			return false, err
		}
		p.log.Info("leftover blackhole route removed", "family", f.String(), "table_id", r.Table)
	}
	return false, nil
}

// meridio reports whether a rule has the form of those of a Meridio frontend: `from VIP lookup
// TABLE`, without other selectors.
func (p policy) meridio(r rtnetlink.Rule) bool {
	return !r.Extra && r.Action == unix.FR_ACT_TO_TBL && r.Source.IsValid() && r.Mark == 0 && r.Mask == 0 &&
		(r.Priority == meridioPriority && r.Table == p.o.TableID ||
			r.Priority == meridioBlackholePriority && r.Table == p.o.blackholeTable())
}

// remove removes the rules and blackhole routes of this package.
func (p policy) remove(f vip.Family) error {
	c, err := rtnetlink.Dial()
	if err != nil {
		return err
	}
	defer c.Close()
	observed, err := c.Rules(f)
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range observed {
		if r.Protocol == protocol && !r.Extra || slices.ContainsFunc(p.rules(f), r.Same) {
			errs = append(errs, c.DeleteRule(r))
		}
	}
	routes, err := c.Routes(f, rtnetlink.RouteFilter{Protocol: protocol})
	errs = append(errs, err)
	for _, r := range routes {
		if r.Type == unix.RTN_BLACKHOLE && r.IsDefault() {
			errs = append(errs, c.DeleteRoute(r))
		}
	}
	return errors.Join(errs...)
}

// missingRules returns the desired rules that were not observed.
func missingRules(observed, desired []rtnetlink.Rule) []rtnetlink.Rule {
	return slices.DeleteFunc(slices.Clone(desired), func(d rtnetlink.Rule) bool {
		return slices.ContainsFunc(observed, d.Same)
	})
}
