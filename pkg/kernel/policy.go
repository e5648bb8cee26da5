package kernel

import (
	"errors"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Priorities of the rules that a Meridio frontend makes, one pair a VIP.
const (
	meridioPriority          = 100
	meridioBlackholePriority = 101
)

// leftoversAtOnce bounds the rules removed between two passes. The kernel searches
// its list for each: of 20 000 rules, two for each of 10 000 VIPs, 200 take 0.2 s
// at first, all of them 12 s.
const leftoversAtOnce = 200

// policy is the part that acts on the mark: rules and a blackhole for each family.
type policy struct {
	o   Options
	log *slog.Logger
}

// rules returns what must stand, in the order in which it is added: while some
// are missing, VIP traffic is dropped rather than let out anywhere.
//
// IPv6 needs a third one, which drops by itself. The kernel binds an IPv6
// blackhole route to the loopback interface, so that a socket bound to another
// interface passes it by (seen on Linux 6.18: packets of such a socket left
// through the primary network); the route also vanishes when lo goes down.
func (p policy) rules(f vip.Family) []rule {
	r := rule{family: f, mark: p.o.Mark, mask: p.o.Mask, protocol: protocol}
	gateways, blackhole, drop := r, r, r
	gateways.priority, gateways.action, gateways.table = uint32(p.o.Priority), unix.FR_ACT_TO_TBL, p.o.TableID
	blackhole.priority, blackhole.action, blackhole.table = uint32(p.o.Priority)+1, unix.FR_ACT_TO_TBL, p.o.blackholeTable()
	drop.priority, drop.action = uint32(p.o.Priority)+2, unix.FR_ACT_BLACKHOLE
	if f == vip.IPv6 {
		return []rule{drop, blackhole, gateways}
	}
	return []rule{blackhole, gateways}
}

// ensure makes blackhole and rules of a family stand and reads them back. It
// tells whether it had to change something.
func (p policy) ensure(f vip.Family) (changed bool, err error) {
	if changed, err = p.ensureBlackhole(f); err != nil {
		return changed, err
	}
	have, err := listRules(f)
	if err != nil {
		return changed, err
	}
	missing := lacking(have, p.rules(f))
	if len(missing) == 0 {
		return changed, nil
	}
	for _, r := range missing {
		if err := addRule(r); err != nil {
			return true, err
		}
		p.log.Info("policy rule added", "rule", r.String())
	}
	if have, err = listRules(f); err != nil {
		return true, err
	}
	if missing := lacking(have, p.rules(f)); len(missing) > 0 {
		return true, fmt.Errorf("rule %s was added but does not stand", missing[0])
	}
	return true, nil
}

func (p policy) ensureBlackhole(f vip.Family) (changed bool, err error) {
	table := p.o.blackholeTable()
	stands := func() (bool, error) {
		routes, err := listRoutes(f, routeFilter{table: table})
		if err != nil {
			return false, err
		}
		stands := false
		for _, r := range routes {
			if !r.dropsTraffic() {
				return false, fmt.Errorf("table %d must hold nothing but a blackhole, but has %s: remove it, or choose another table ID", table, r)
			}
			// A blackhole of somebody else ends with its maker.
			stands = stands || r.isDefault() && r.protocol == protocol
		}
		return stands, nil
	}
	if ok, err := stands(); ok || err != nil {
		return false, err
	}
	if err := addBlackhole(f, table); err != nil {
		return false, err
	}
	p.log.Info("blackhole default added", "family", f.String(), "table_id", table)
	ok, err := stands()
	if err == nil && !ok {
		err = fmt.Errorf("%s blackhole default in table %d was added but does not stand", f, table)
	}
	return true, err
}

// removeLeftovers removes what is not wanted any more, now that the wanted
// stands: rules and blackholes that we made with other options, and the rules
// of a former Meridio frontend. It removes some, so that new VIPs need not wait
// behind ten thousand, and tells whether there are more.
func (p policy) removeLeftovers(f vip.Family) (more bool, err error) {
	have, err := listRules(f)
	if err != nil {
		return false, err
	}
	removed := 0
	for _, r := range have {
		ours := r.protocol == protocol && !r.exotic && len(lacking(p.rules(f), []rule{r})) > 0
		if !ours && !p.meridio(r) {
			continue
		}
		if removed == leftoversAtOnce {
			p.log.Info("leftover policy rules removed, more to come", "family", f.String(), "rules", removed)
			return true, nil
		}
		if err := deleteRule(r); err != nil {
			return false, err
		}
		removed++
		p.log.Debug("leftover policy rule removed", "rule", r.String())
	}
	if removed > 0 {
		p.log.Info("leftover policy rules removed", "family", f.String(), "rules", removed)
	}
	routes, err := listRoutes(f, routeFilter{protocol: protocol})
	if err != nil {
		return false, err
	}
	for _, r := range routes {
		if r.table == p.o.blackholeTable() || r.kind != unix.RTN_BLACKHOLE || !r.isDefault() {
			continue
		}
		if err := deleteBlackhole(f, r.table); err != nil {
			return false, err
		}
		p.log.Info("leftover blackhole removed", "family", f.String(), "table_id", r.table)
	}
	return false, nil
}

// meridio tells whether a Meridio frontend made the rule: `from VIP lookup
// TABLE`, with nothing else to it.
func (p policy) meridio(r rule) bool {
	return !r.exotic && r.action == unix.FR_ACT_TO_TBL && r.source.IsValid() && r.mark == 0 && r.mask == 0 &&
		(r.priority == meridioPriority && r.table == p.o.TableID ||
			r.priority == meridioBlackholePriority && r.table == p.o.blackholeTable())
}

// remove removes rules and blackholes of ours.
func (p policy) remove(f vip.Family) error {
	have, err := listRules(f)
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range have {
		if r.protocol == protocol && !r.exotic || len(lacking([]rule{r}, p.rules(f))) < len(p.rules(f)) {
			errs = append(errs, deleteRule(r))
		}
	}
	routes, err := listRoutes(f, routeFilter{protocol: protocol})
	errs = append(errs, err)
	for _, r := range routes {
		if r.kind == unix.RTN_BLACKHOLE && r.isDefault() {
			errs = append(errs, deleteBlackhole(f, r.table))
		}
	}
	return errors.Join(errs...)
}

// lacking returns the wanted rules that are not in have.
func lacking(have, want []rule) []rule {
	var missing []rule
	for _, w := range want {
		found := false
		for _, h := range have {
			found = found || h.same(w)
		}
		if !found {
			missing = append(missing, w)
		}
	}
	return missing
}
