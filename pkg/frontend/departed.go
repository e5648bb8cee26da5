package frontend

import (
	"maps"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// departed maps each VIP that left the configuration to the end of its source routing. Targets
// still answer its last flows.
type departed map[vip.VIP]time.Time

// configure applies a change of the configured VIPs. Removed VIPs keep source routing until end.
func (d departed) configure(was, is vip.Set, end time.Time) {
	for v := range was {
		if !is.Has(v) {
			d[v] = end
		}
	}
	maps.DeleteFunc(d, func(v vip.VIP, _ time.Time) bool { return is.Has(v) })
}

// expire removes the expired VIPs and returns the next expiry, or zero if no VIP is left.
func (d departed) expire(now time.Time) (next time.Time) {
	for v, end := range d {
		switch {
		case !now.Before(end):
			delete(d, v)
		case next.IsZero() || end.Before(next):
			next = end
		}
	}
	return next
}

// and returns the union of the configured and the departed VIPs. Without departed VIPs it returns
// configured itself.
func (d departed) and(configured vip.Set) vip.Set {
	if len(d) == 0 {
		return configured
	}
	all := maps.Clone(configured)
	for v := range d {
		all[v] = struct{}{}
	}
	return all
}
