package frontend

import (
	"maps"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// departed are the VIPs that left the configuration, and until when each keeps its source routing:
// targets still answer its last flows.
type departed map[vip.VIP]time.Time

// configure records that other VIPs are configured; those that leave stay until end.
func (d departed) configure(was, is vip.Set, end time.Time) {
	for v := range was {
		if !is.Has(v) {
			d[v] = end
		}
	}
	maps.DeleteFunc(d, func(v vip.VIP, _ time.Time) bool { return is.Has(v) })
}

// expire removes the VIPs whose time is over, and returns when the next one's is; zero: none is left.
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

// and returns the configured VIPs and the departed ones; the same set if there are none.
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
