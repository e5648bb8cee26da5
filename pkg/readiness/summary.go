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
func (t *Table) Summary() Summary {
	t.mu.Lock()
	defer t.mu.Unlock()
	left, _ := t.leaseLeft(time.Now())
	return Summary{Synced: t.synced, GoingAway: t.goingAway, Ready: t.ready, LeaseLeft: left}
}

// Subscribe returns a channel that holds a token initially and after each decision, heartbeat and
// GoAway. end cancels the subscription.
func (t *Table) Subscribe() (changed <-chan struct{}, end func()) {
	c := t.open()
	return c.wake, func() { t.close(c) }
}
