package gate

import (
	"math"
	"time"
)

// weightInterval is the minimum time between two changes of the weight alone: each is an UPDATE, and
// routers hash flows again.
const weightInterval = 10 * time.Second

// Weight returns the weight of ready targets, which count less by some tenths: a tenth at least,
// unless there are none.
func Weight(ready, warmingTenths uint32) uint32 {
	tenths := 10 * min(ready, math.MaxUint32/10)
	if warmingTenths >= tenths {
		return min(1, tenths)
	}
	return tenths - warmingTenths
}

// Weigh adds weights to all decisions. The weights of the current decisions are not changes.
func (gate *Gate) Weigh(now time.Time) {
	if gate.weighs {
		return
	}
	gate.weighs = true
	for _, entry := range gate.entries {
		entry.decision.Weight = gate.weigh(now, entry, entry.decision)
	}
}

// weigh returns the weight of a new decision; the newest weight if that differs in another way.
func (gate *Gate) weigh(now time.Time, entry *entry, decision Decision) uint32 {
	if !gate.weighs || decision.Advertisement == Withdrawn {
		return 0
	}
	current := entry.decision.Weight
	decision.Weight = current
	if decision == entry.decision && entry.weight != current && now.Before(entry.nextWeight) {
		if !entry.weightTimer.Equal(entry.nextWeight) {
			entry.weightTimer = entry.nextWeight
			gate.scheduleDirty(entry.nextWeight, entry.vip)
		}
		return current
	}
	if entry.weight != current {
		entry.nextWeight = now.Add(weightInterval)
	}
	return entry.weight
}
