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
	merged := &mergedChanges{
		index: make(map[vip.VIP]int, len(changed)+len(removed)), changed: changed,
		removed: make([]bool, len(changed), len(changed)+len(removed)),
	}
	for i := range changed {
		merged.index[changed[i].VIP] = i
	}
	merged.add(nil, removed)
	return merged
}

// add adds the changes of a later event.
func (merged *mergedChanges) add(changed []VIPReadiness, removed []vip.VIP) {
	for i := range changed {
		merged.set(&changed[i], false)
	}
	for _, v := range removed {
		merged.set(&VIPReadiness{VIP: v}, true)
	}
}

func (merged *mergedChanges) set(readiness *VIPReadiness, removed bool) {
	if index, known := merged.index[readiness.VIP]; known {
		merged.changed[index], merged.removed[index] = *readiness, removed
		return
	}
	merged.index[readiness.VIP] = len(merged.changed)
	merged.changed, merged.removed = append(merged.changed, *readiness), append(merged.removed, removed)
}

// split returns the changed and the removed VIPs in the order of arrival. c must not be used again.
func (merged *mergedChanges) split() (changed []VIPReadiness, removed []vip.VIP) {
	changed = merged.changed[:0]
	for i := range merged.changed {
		if merged.removed[i] {
			removed = append(removed, merged.changed[i].VIP)
		} else {
			changed = append(changed, merged.changed[i])
		}
	}
	return changed, removed
}
