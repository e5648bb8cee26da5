package readiness

import "time"

// Summary is the state of a Table without its VIPs.
type Summary struct {
	Synced    bool
	GoingAway bool
	Ready     int           // number of READY VIPs
	LeaseLeft time.Duration // 0 after the lease expired
}

// Summary returns the summary. Its cost does not depend on the number of VIPs.
func (table *Table) Summary() Summary {
	table.mu.Lock()
	defer table.mu.Unlock()
	left, _ := table.leaseLeft(time.Now())
	return Summary{Synced: table.synced, GoingAway: table.goingAway, Ready: table.ready, LeaseLeft: left}
}

// Subscribe returns a channel that holds a token initially and after each decision, heartbeat and
// GoAway. end cancels the subscription.
func (table *Table) Subscribe() (changed <-chan struct{}, end func()) {
	cursor := table.open()
	return cursor.wake, func() { table.close(cursor) }
}
