package readiness

import (
	"slices"
	"time"
)

// cursor is the place of one watch in the table. All it costs the table is a
// wake-up.
type cursor struct {
	wake chan struct{} // holds one token: there may be something to send

	// The rest is guarded by Table.mu.
	sent   Position // zero before the first message
	synced bool     // a synced snapshot was taken
	beat   uint64   // the newest beat that a message told
	away   bool     // GoingAway was taken
}

// kind is what a message of a watch says.
type kind uint8

const (
	kindNone kind = iota
	kindSnapshot
	kindDelta
	kindHeartbeat
	kindGoingAway
)

// batch is the next thing to send on a watch.
type batch struct {
	kind     kind
	first    bool // the first of its watch
	position Position
	synced   bool
	drainEnd time.Time
	entries  []entry // some superseded
}

// open adds a watch at the beginning.
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

// next returns what the watch has to send now, merged so that the newest value
// of each VIP wins, and moves its cursor behind it. It returns kindNone when
// there is nothing, or when the table may not speak (see left).
func (t *Table) next(c *cursor, now time.Time) batch {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.left(now); !ok {
		return batch{}
	}
	b := batch{first: c.sent == Position{}, position: Position{t.instance, t.revision}, synced: t.synced}
	switch {
	case b.first, t.synced && (!c.synced || c.sent.Revision < t.dropped):
		b.kind = kindSnapshot
		// An unsynced snapshot says nothing about any VIP.
		if t.synced {
			b.entries = slices.Clone(t.log)
		}
		c.synced = t.synced
		c.sent = b.position
	case t.away && !c.away: // before the revision that stands for it
		b.kind = kindGoingAway
		b.position, b.drainEnd = c.sent, t.awayEnd
		c.away = true
	case t.synced && c.sent.Revision < t.revision:
		b.kind = kindDelta
		b.entries = t.since(c.sent.Revision)
		c.sent = b.position
	case c.beat < t.beats:
		b.kind = kindHeartbeat
		b.position = c.sent
	default:
		return batch{}
	}
	c.beat = t.beats
	return b
}

// since returns what is newer than a revision.
func (t *Table) since(revision uint64) []entry {
	i := len(t.log)
	for i > 0 && t.log[i-1].revision > revision {
		i--
	}
	return slices.Clone(t.log[i:])
}

// sent returns the revision that a watch has taken.
func (t *Table) sent(c *cursor) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return c.sent.Revision
}

// vouch returns the lease of a message that is sent now.
func (t *Table) vouch(now time.Time) (time.Duration, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.left(now)
}
