package readiness

import (
	"cmp"
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

// TableOptions configure a Table.
type TableOptions struct {
	InstanceID string // unique per start of the load balancer; default: random
	// Lease is the validity of a commit or heartbeat. The owner must send at least three per lease.
	// Default: DefaultLease.
	Lease time.Duration
	// StaleGrace is the time for which the data plane forwards without the load balancer's process.
	StaleGrace time.Duration
}

// Decision is a decision of the load balancer. It is applied atomically.
type Decision struct {
	Changed []VIPReadiness // new VIPs, and VIPs that may have changed
	Removed []vip.VIP      // VIPs that no stream serves any longer
	Synced  bool           // every target was checked; never reset
	At      time.Time      // default: now
}

// Table holds the readiness of every VIP and the order of the decisions. Its methods are safe for
// concurrent use and never wait for a reader.
type Table struct {
	instance   string
	lease      time.Duration
	staleGrace *durationpb.Duration // nil: none

	mu       sync.Mutex
	revision uint64 // 0 before the first decision
	synced   bool
	// log holds one record for each VIP and for each removal that was not compacted, ordered by
	// revision. A watch that has sent revision r next sends the entries with a revision after r.
	log   []entry
	index map[vip.VIP]*newest
	live  int // number of VIPs, without removed ones
	ready int // number of READY VIPs
	// dropped is the newest revision of a compacted removal. A watch that has not sent this revision
	// needs a snapshot.
	dropped    uint64
	renewedAt  time.Time // last commit or heartbeat
	heartbeats uint64
	goingAway  bool
	drainEnd   time.Time
	cursors    map[*cursor]struct{}
}

// newest is the newest record of a VIP.
type newest struct {
	*record     // nil once the removal of the VIP was compacted
	at      int // index in the log
	// next is the index entry of the VIP that followed in an earlier decision. Decisions list VIPs in
	// the same order, so most VIPs are found without a map lookup.
	next *newest
}

// entry is a slot of the log. A superseded entry keeps its revision, so that a scan from the end of
// the log stops at the right entry.
type entry struct {
	revision uint64
	*record  // nil when superseded
}

// record is a VIP in one revision. It is immutable.
type record struct {
	VIPReadiness
	removed bool
	newest  *newest // entry of the VIP in Table.index
}

// NewTable returns an empty table, which sends nothing before the first decision.
func NewTable(o TableOptions) *Table {
	t := &Table{
		instance: cmp.Or(o.InstanceID, rand.Text()), lease: cmp.Or(o.Lease, DefaultLease),
		index: make(map[vip.VIP]*newest), cursors: make(map[*cursor]struct{}),
	}
	if o.StaleGrace > 0 {
		t.staleGrace = durationpb.New(o.StaleGrace)
	}
	return t
}

// Commit applies a decision, wakes every watch and renews the lease. It returns the revision, which
// advances only if the decision changed the table.
func (t *Table) Commit(d Decision) (revision uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewedAt = time.Now()
	if d.At.IsZero() {
		d.At = t.renewedAt
	}
	next := t.revision + 1
	changed := t.revision == 0
	w := writer{table: t, at: d.At, revision: next, left: len(d.Changed) + len(d.Removed)}
	for i := range d.Changed {
		changed = w.put(d.Changed[i]) || changed
	}
	for _, v := range d.Removed {
		changed = w.remove(v) || changed
	}
	if d.Synced && !t.synced {
		t.synced, changed = true, true
	}
	if !changed {
		return t.revision
	}
	t.revision = next
	t.compact()
	t.wakeAll()
	return t.revision
}

// writer records one decision.
type writer struct {
	table    *Table
	at       time.Time // of the decision
	revision uint64
	left     int      // number of unprocessed VIPs of the decision
	added    int      // number of added records
	free     []record // allocated but unused
	last     *newest  // of the previous VIP

	// detail caches the last detail, which many VIPs of a decision share, clean its cleanDetail.
	detail, clean string
}

// find returns the newest record of a VIP; nil if it has none.
func (w *writer) find(v vip.VIP) *newest {
	if w.last != nil {
		if n := w.last.next; n != nil && n.record != nil && n.VIP == v {
			w.last = n
			return n
		}
	}
	n := w.table.index[v]
	if n != nil {
		w.follow(n)
	}
	return n
}

// follow records that n follows the previous VIP of the decision.
func (w *writer) follow(n *newest) {
	if w.last != nil {
		w.last.next = n
	}
	w.last = n
}

// put records r if it differs from the recorded value.
func (w *writer) put(r VIPReadiness) bool {
	w.left--
	if r.Detail != w.detail {
		w.detail, w.clean = r.Detail, cleanDetail(r.Detail)
	}
	r.Detail = w.clean
	if r.State != vip.Draining {
		r.DrainEnd = time.Time{}
	}
	t, slot := w.table, w.find(r.VIP)
	var old *record
	if slot != nil && !slot.removed {
		old = slot.record
	}
	if r.Since.IsZero() {
		r.Since = w.at
		if old != nil && old.State == r.State {
			r.Since = old.Since
		}
	}
	if old != nil && old.equal(&r) {
		return false
	}
	if old == nil {
		t.live++
	} else if old.State == vip.Ready {
		t.ready--
	}
	if r.State == vip.Ready {
		t.ready++
	}
	w.add(slot, &r, false)
	return true
}

// remove records the removal of v, unless v is not in the table.
func (w *writer) remove(v vip.VIP) bool {
	w.left--
	t, slot := w.table, w.find(v)
	if slot == nil || slot.removed {
		return false
	}
	t.live--
	if slot.State == vip.Ready {
		t.ready--
	}
	w.add(slot, &VIPReadiness{VIP: v}, true)
	return true
}

// recordsPerBlock is the number of records in one allocation of 2 KiB. Blocks are allocated only
// after a decision has changed more than one in singleRecords VIPs. A block stays in memory as
// long as one of its records is the newest of a VIP: if decisions about few VIPs allocated blocks,
// most records in memory would be superseded.
const (
	recordsPerBlock = 15
	singleRecords   = 8
)

// add appends a record to the log. slot is the index entry of the VIP, nil for a new VIP.
func (w *writer) add(slot *newest, r *VIPReadiness, removed bool) {
	t := w.table
	if slot == nil {
		slot = new(newest)
		t.index[r.VIP] = slot
		w.follow(slot)
	} else {
		t.log[slot.at].record = nil
	}
	if len(w.free) == 0 {
		size := 1
		if w.added > t.live/singleRecords {
			size = min(w.left+1, recordsPerBlock)
		}
		w.free = make([]record, size)
	}
	w.added++
	added := &w.free[0]
	w.free = w.free[1:]
	*added = record{*r, removed, slot}
	slot.record, slot.at = added, len(t.log)
	t.log = append(t.log, entry{w.revision, added})
}

// logSlack is the number of records that the log may hold in excess of twice the number of VIPs.
const logSlack = 1024

// compact discards superseded records and removals once they exceed half of the log. The size of
// the log stays proportional to the number of VIPs, at an amortized constant cost per change.
func (t *Table) compact() {
	if len(t.log) <= 2*t.live+logSlack {
		return
	}
	kept := t.log[:0] // in place: batches hold copies of the entries
	if limit := 2*t.live + logSlack; cap(t.log) > 2*limit {
		kept = make([]entry, 0, limit)
	}
	for _, e := range t.log {
		switch {
		case e.record == nil:
		case e.removed:
			t.dropped = max(t.dropped, e.revision)
			delete(t.index, e.VIP)
			*e.newest = newest{} // also breaks chains of next, which would retain removed VIPs
		default:
			e.newest.at = len(kept)
			kept = append(kept, e)
		}
	}
	clear(t.log[len(kept):])
	t.log = kept
}

// Heartbeat renews the lease of every watch. Only the loop that evaluates readiness may call it.
func (t *Table) Heartbeat() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.revision == 0 {
		return
	}
	t.renewedAt = time.Now()
	t.heartbeats++
	t.wakeAll()
}

// GoAway announces to every present and future watch that the load balancer stops after drainFor.
// Commits and heartbeats continue. Only the first call has an effect. GoAway advances the revision,
// and a synced watch sends the announcement before the new revision: a frontend that reports this
// revision as applied has received the announcement.
func (t *Table) GoAway(drainFor time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.goingAway {
		return
	}
	t.goingAway, t.drainEnd = true, time.Now().Add(drainFor)
	if t.revision > 0 {
		t.revision++
	}
	t.wakeAll()
}

func (t *Table) wakeAll() {
	for c := range t.cursors {
		latest.Wake(c.wake)
	}
}

// Position returns the position of the newest decision; the revision is 0 before the first.
func (t *Table) Position() Position {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Position{t.instance, t.revision}
}

// Synced reports whether any decision was synced.
func (t *Table) Synced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

// TableState is the whole table at one time.
type TableState struct {
	Position  Position
	Synced    bool
	LeaseLeft time.Duration // 0 after the lease expired
	GoingAway bool
	VIPs      []VIPReadiness // ordered by vip.Compare
}

// State returns the whole table. It holds the lock only to copy the log.
func (t *Table) State() TableState {
	t.mu.Lock()
	left, _ := t.leaseLeft(time.Now())
	s := TableState{Position: Position{t.instance, t.revision}, Synced: t.synced, LeaseLeft: left, GoingAway: t.goingAway}
	log := slices.Clone(t.log)
	t.mu.Unlock()
	s.VIPs = make([]VIPReadiness, 0, len(log))
	for _, e := range log {
		if e.record != nil && !e.removed {
			s.VIPs = append(s.VIPs, e.VIPReadiness)
		}
	}
	slices.SortFunc(s.VIPs, func(a, b VIPReadiness) int { return vip.Compare(a.VIP, b.VIP) })
	return s
}

// leaseLeft returns the validity of a message sent at now: the lease minus the age of the last
// commit or heartbeat, rounded up to a hundredth of the lease for readable traces. ok is false
// before the first decision, and after the lease has expired because the loop hangs: no message may
// be sent.
func (t *Table) leaseLeft(now time.Time) (left time.Duration, ok bool) {
	if t.revision == 0 {
		return 0, false
	}
	left = t.lease - now.Sub(t.renewedAt)
	if left < minLease {
		return 0, false
	}
	if grain := t.lease / 100; grain > 0 {
		left = min(t.lease, (left+grain-1)/grain*grain)
	}
	return left, true
}

// cursor is the position of one watch in the table.
type cursor struct {
	wake chan struct{} // holds one token: a message may be pending

	// Table.mu guards the fields below.
	sent      Position // zero before the first message
	synced    bool     // a synced snapshot was sent
	heartbeat uint64   // newest heartbeat sent
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
	entries  []entry // includes superseded ones
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

// next returns the next batch to send on the watch, merged per VIP (newest wins), and advances the
// cursor. The kind is kindNone if no batch is pending or the lease has expired (see leaseLeft).
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

// sent returns the newest revision that a watch has sent.
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
