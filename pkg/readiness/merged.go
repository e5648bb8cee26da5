package readiness

import "github.com/vipgate/vipgate/pkg/vip"

// mergedChanges merges the changes of several events; the newest wins. It is used only if a second
// event arrives before the consumer has taken the first. A single event is passed on unmerged.
type mergedChanges struct {
	index map[vip.VIP]int
	// changed holds each VIP once, at its index. A removed VIP keeps its place, without a state.
	changed []VIPReadiness
	removed []bool // by the index of changed
}

// newMergedChanges returns the changes of the first event. It takes ownership of changed.
func newMergedChanges(changed []VIPReadiness, removed []vip.VIP) *mergedChanges {
	c := &mergedChanges{
		index: make(map[vip.VIP]int, len(changed)+len(removed)), changed: changed,
		removed: make([]bool, len(changed), len(changed)+len(removed)),
	}
	for i := range changed {
		c.index[changed[i].VIP] = i
	}
	c.add(nil, removed)
	return c
}

// add adds the changes of a later event.
func (c *mergedChanges) add(changed []VIPReadiness, removed []vip.VIP) {
	for i := range changed {
		c.set(&changed[i], false)
	}
	for _, v := range removed {
		c.set(&VIPReadiness{VIP: v}, true)
	}
}

func (c *mergedChanges) set(r *VIPReadiness, removed bool) {
	if i, known := c.index[r.VIP]; known {
		c.changed[i], c.removed[i] = *r, removed
		return
	}
	c.index[r.VIP] = len(c.changed)
	c.changed, c.removed = append(c.changed, *r), append(c.removed, removed)
}

// split returns the changed and the removed VIPs in the order of arrival. c must not be used
// afterwards.
func (c *mergedChanges) split() (changed []VIPReadiness, removed []vip.VIP) {
	changed = c.changed[:0]
	for i := range c.changed {
		if c.removed[i] {
			removed = append(removed, c.changed[i].VIP)
		} else {
			changed = append(changed, c.changed[i])
		}
	}
	return changed, removed
}
