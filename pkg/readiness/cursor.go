package readiness

import (
	"slices"
	"sort"
	"time"
)

// cursor is the position of one watch in the table.
type cursor struct {
	wake chan struct{} // holds one token: a message may be pending

	// Table.mu guards the fields below.
	sent      Position // zero before the first message
	synced    bool     // a synced snapshot was sent
	heartbeat uint64   // newest heartbeat sent
	goingAway bool     // GoingAway was sent
}

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
	entries  []entry // includes superseded ones
}

// open adds a watch at the start of the log.
func (table *Table) open() *cursor {
	opened := &cursor{wake: make(chan struct{}, 1)}
	opened.wake <- struct{}{}
	table.mu.Lock()
	defer table.mu.Unlock()
	table.cursors[opened] = struct{}{}
	return opened
}

func (table *Table) close(cursor *cursor) {
	table.mu.Lock()
	defer table.mu.Unlock()
	delete(table.cursors, cursor)
}

// next returns the next batch to send on the watch, merged per VIP (newest wins), and advances the
// cursor. The kind is kindNone if no batch is pending or the lease has expired (see leaseLeft).
func (table *Table) next(cursor *cursor, now time.Time) batch {
	table.mu.Lock()
	defer table.mu.Unlock()
	if _, ok := table.leaseLeft(now); !ok {
		return batch{}
	}
	current := Position{table.instance, table.revision}
	next := batch{first: cursor.sent == Position{}, position: current, synced: table.synced}
	switch {
	case next.first, table.synced && (!cursor.synced || cursor.sent.Revision < table.dropped):
		next.kind = kindSnapshot
		// An unsynced snapshot contains no VIPs.
		if table.synced {
			next.entries = slices.Clone(table.log)
		}
		cursor.synced = table.synced
		cursor.sent = next.position
	case table.goingAway && !cursor.goingAway: // before the revision that GoAway created
		next.kind = kindGoingAway
		next.position, next.drainEnd = cursor.sent, table.drainEnd
		cursor.goingAway = true
	case table.synced && cursor.sent.Revision < table.revision:
		next.kind = kindDelta
		after := func(i int) bool { return table.log[i].revision > cursor.sent.Revision }
		pending := table.log[sort.Search(len(table.log), after):]
		if cursor.sent.Revision >= table.superseded {
			if first := firstRevisions(pending); len(first) < len(pending) {
				next.position.Revision, pending = first[len(first)-1].revision, first
			}
		}
		next.entries = slices.Clone(pending)
		cursor.sent = next.position
	case cursor.heartbeat < table.heartbeats:
		next.kind = kindHeartbeat
		next.position = cursor.sent
	default:
		return batch{}
	}
	cursor.heartbeat = table.heartbeats
	return next
}

// firstRevisions returns the entries of the next revision to send, and of the following ones while
// all together are less than a part. A frontend applies a revision with its last part, so that it
// applies the first revisions of a large decision while the table sends the next ones.
//
// A VIP that changed again has no entry for the older value, so a reader could not see the state at
// the older revision. In that case all entries are sent as one revision.
func firstRevisions(pending []entry) []entry {
	for i := range pending {
		if i >= vipsPerPart && pending[i].revision != pending[i-1].revision {
			return pending[:i]
		}
		if pending[i].record == nil {
			return pending
		}
	}
	return pending
}

func (table *Table) sent(cursor *cursor) uint64 {
	table.mu.Lock()
	defer table.mu.Unlock()
	return cursor.sent.Revision
}

// currentLease returns the lease of a message sent at now.
func (table *Table) currentLease(now time.Time) (time.Duration, bool) {
	table.mu.Lock()
	defer table.mu.Unlock()
	return table.leaseLeft(now)
}
