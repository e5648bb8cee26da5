// Package departed keeps the VIPs that left the configuration until their last flows have ended.
package departed

import (
	"maps"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// VIPs maps each VIP that left the configuration to the end of its source routing. Targets
// still answer its last flows.
type VIPs map[vip.VIP]time.Time

// Configure applies a change of the configured VIPs. Removed VIPs keep source routing until end.
func (departed VIPs) Configure(was, is vip.Set, end time.Time) {
	for v := range was {
		if !is.Has(v) {
			departed[v] = end
		}
	}
	maps.DeleteFunc(departed, func(v vip.VIP, _ time.Time) bool { return is.Has(v) })
}

// Expire removes the expired VIPs and returns the next expiry, or zero if no VIP is left.
func (departed VIPs) Expire(now time.Time) (next time.Time) {
	for v, end := range departed {
		switch {
		case !now.Before(end):
			delete(departed, v)
		case next.IsZero() || end.Before(next):
			next = end
		}
	}
	return next
}

// And returns the union of the configured and the departed VIPs. Without departed VIPs it returns
// configured itself.
func (departed VIPs) And(configured vip.Set) vip.Set {
	if len(departed) == 0 {
		return configured
	}
	all := maps.Clone(configured)
	for v := range departed {
		all[v] = struct{}{}
	}
	return all
}
