package readiness

import (
	"iter"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
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
		i := len(t.log)
		for i > 0 && t.log[i-1].revision > c.sent.Revision {
			i--
		}
		b.entries = slices.Clone(t.log[i:])
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

// staleGraceProto returns the grace period for messages; nil: none.
func (t *Table) staleGraceProto() *durationpb.Duration {
	if t.staleGrace <= 0 {
		return nil
	}
	return durationpb.New(t.staleGrace)
}

// messages yields the messages of a batch, in parts of vipsPerPart.
func (b batch) messages() iter.Seq[*response] {
	return func(yield func(*response) bool) {
		switch b.kind {
		case kindHeartbeat:
			yield(&response{Event: &readinessv1.WatchReadinessResponse_Heartbeat{Heartbeat: &readinessv1.Heartbeat{}}})
			return
		case kindGoingAway:
			goingAway := &readinessv1.GoingAway{DrainFor: drainFor(b.drainEnd, time.Now())}
			yield(&response{Event: &readinessv1.WatchReadinessResponse_GoingAway{GoingAway: goingAway}})
			return
		}
		rest := b.entries
		for last := false; !last; {
			var changed []*readinessv1.VipReadiness
			var removed []string
			now := time.Now()
			for len(rest) > 0 && len(changed)+len(removed) < vipsPerPart {
				e := rest[0]
				rest = rest[1:]
				switch {
				case e.record == nil:
				case !e.removed:
					changed = append(changed, e.VIPReadiness.Proto(now))
				case b.kind == kindDelta:
					removed = append(removed, e.VIP.String())
				}
			}
			last = len(rest) == 0
			m := &response{}
			if b.kind == kindSnapshot {
				snapshot := &readinessv1.Snapshot{Vips: changed, Synced: b.synced, Last: last}
				m.Event = &readinessv1.WatchReadinessResponse_Snapshot{Snapshot: snapshot}
			} else {
				delta := &readinessv1.Delta{Changed: changed, Removed: removed, Last: last}
				m.Event = &readinessv1.WatchReadinessResponse_Delta{Delta: delta}
			}
			if !yield(m) {
				return
			}
		}
	}
}
