package readiness

import (
	"slices"
	"time"
)

// cursor is the position of one watch in the table.
type cursor struct {
	wake chan struct{} // holds one token: a message may be pending

	// The rest is guarded by Table.mu.
	sent      Position // zero before the first message
	synced    bool     // a synced snapshot was sent
	heartbeat uint64   // newest heartbeat that was sent
	goingAway bool     // GoingAway was sent
}

// kind is the kind of a message of a watch.
type kind uint8

const (
	kindNone kind = iota
	kindSnapshot
	kindDelta
	kindHeartbeat
	kindGoingAway
)

// batch is the next content to send on a watch.
type batch struct {
	kind     kind
	first    bool // first of its watch
	position Position
	synced   bool
	drainEnd time.Time
	entries  []entry // some are superseded
}

// open adds a watch at the start of the log.
func (t *Table) open() *cursor {
	c := &cursor{wake: make(chan struct{}, 1)}
	c.wake <- struct{}{}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cursors[c] = struct{}{}
	return c
}

// close removes a watch.
func (t *Table) close(c *cursor) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.cursors, c)
}

// next returns what the watch sends next, merged per VIP (newest wins), and advances its cursor. It
// returns kindNone when nothing is pending or the lease expired (see leaseLeft).
func (t *Table) next(c *cursor, now time.Time) batch {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.leaseLeft(now); !ok {
		return batch{}
	}
	b := batch{first: c.sent == Position{}, position: Position{t.instance, t.revision}, synced: t.synced}
	switch {
	case b.first, t.synced && (!c.synced || c.sent.Revision < t.dropped):
		b.kind = kindSnapshot
		// An unsynced snapshot contains no VIPs.
		if t.synced {
			b.entries = slices.Clone(t.log)
		}
		c.synced = t.synced
		c.sent = b.position
	case t.goingAway && !c.goingAway: // before the revision that GoAway created
		b.kind = kindGoingAway
		b.position, b.drainEnd = c.sent, t.drainEnd
		c.goingAway = true
	case t.synced && c.sent.Revision < t.revision:
		b.kind = kindDelta
		b.entries = t.since(c.sent.Revision)
		c.sent = b.position
	case c.heartbeat < t.heartbeats:
		b.kind = kindHeartbeat
		b.position = c.sent
	default:
		return batch{}
	}
	c.heartbeat = t.heartbeats
	return b
}

// since returns the entries newer than a revision.
func (t *Table) since(revision uint64) []entry {
	i := len(t.log)
	for i > 0 && t.log[i-1].revision > revision {
		i--
	}
	return slices.Clone(t.log[i:])
}

// sent returns the revision that a watch has sent.
func (t *Table) sent(c *cursor) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return c.sent.Revision
}

// currentLease returns the lease of a message sent at now.
func (t *Table) currentLease(now time.Time) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.leaseLeft(now)
}
