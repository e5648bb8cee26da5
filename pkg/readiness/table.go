package readiness

import (
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// TableOptions says how a Table speaks.
type TableOptions struct {
	// InstanceID tells this start of the load balancer from all others.
	// Default: random.
	InstanceID string
	// Lease is how long a sign of life stays valid. Default: DefaultLease. The
	// owner beats at least four times in a lease.
	Lease time.Duration
	// StaleGrace is how long the data plane goes on forwarding without the load
	// balancer's process.
	StaleGrace time.Duration
}

// Decision is what the load balancer decided at one moment. It is applied whole.
type Decision struct {
	// Changed holds the VIPs whose readiness may have changed, and new ones.
	Changed []VIPReadiness
	// Removed holds the VIPs that nothing serves any longer.
	Removed []vip.VIP
	// Synced says that every target was checked once. It is never taken back.
	Synced bool
	// At is when the decision was made. Default: now.
	At time.Time
}

// Table holds the readiness of every VIP and the order of the decisions. Its
// methods may be called from any goroutine and never wait for a reader.
type Table struct {
	instance          string
	lease, staleGrace time.Duration

	mu       sync.Mutex
	revision uint64 // 0 before the first decision
	synced   bool
	// log holds one record for each VIP and for each removed VIP that has not
	// been dropped, ordered by revision. A watch that has sent revision r finds
	// all it lacks behind the entries of r.
	log   []entry
	index map[vip.VIP]int // where the record of a VIP is in log
	live  int             // VIPs that were not removed
	// dropped is the newest revision of a removal that is no longer in log. A
	// watch that has not sent it needs a snapshot.
	dropped uint64
	alive   time.Time // the last sign of life
	beats   uint64
	away    bool
	awayEnd time.Time
	cursors map[*cursor]struct{}
}

// entry is a place in the log. It keeps its revision when a newer record of its
// VIP took over, so that a walk from the end knows where to stop.
type entry struct {
	revision uint64
	*record  // nil when superseded
}

// record is one VIP as one decision left it. It is immutable.
type record struct {
	VIPReadiness
	removed bool
}

// NewTable returns an empty table, which says nothing before the first decision.
func NewTable(o TableOptions) *Table {
	if o.InstanceID == "" {
		o.InstanceID = rand.Text()
	}
	if o.Lease <= 0 {
		o.Lease = DefaultLease
	}
	return &Table{
		instance:   o.InstanceID,
		lease:      o.Lease,
		staleGrace: o.StaleGrace,
		index:      make(map[vip.VIP]int),
		cursors:    make(map[*cursor]struct{}),
	}
}

// Commit applies a decision and tells it to every watch. It returns the
// revision of the state, which is a new one only if the decision changed
// something. Every call is a sign of life.
func (t *Table) Commit(d Decision) (revision uint64) {
	if d.At.IsZero() {
		d.At = time.Now()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.alive = time.Now()
	next := t.revision + 1
	changed := t.revision == 0
	for _, r := range d.Changed {
		changed = t.put(r, d.At, next) || changed
	}
	for _, v := range d.Removed {
		changed = t.remove(v, next) || changed
	}
	if d.Synced && !t.synced {
		t.synced, changed = true, true
	}
	if !changed {
		return t.revision
	}
	t.revision = next
	t.compact()
	t.wake()
	return t.revision
}

// put records r unless it says nothing new.
func (t *Table) put(r VIPReadiness, at time.Time, revision uint64) bool {
	r.Detail = cleanDetail(r.Detail)
	if r.State != Draining {
		r.DrainEnd = time.Time{}
	}
	var old *record
	if i, ok := t.index[r.VIP]; ok && !t.log[i].removed {
		old = t.log[i].record
	}
	if r.Since.IsZero() {
		r.Since = at
		if old != nil && old.State == r.State {
			r.Since = old.Since
		}
	}
	if old != nil && old.equal(r) {
		return false
	}
	if old == nil {
		t.live++
	}
	t.add(&record{VIPReadiness: r}, revision)
	return true
}

// remove records that v is gone, if it was there.
func (t *Table) remove(v vip.VIP, revision uint64) bool {
	i, ok := t.index[v]
	if !ok || t.log[i].removed {
		return false
	}
	t.live--
	t.add(&record{VIPReadiness: VIPReadiness{VIP: v}, removed: true}, revision)
	return true
}

func (t *Table) add(r *record, revision uint64) {
	if i, ok := t.index[r.VIP]; ok {
		t.log[i].record = nil
	}
	t.index[r.VIP] = len(t.log)
	t.log = append(t.log, entry{revision, r})
}

// slack is how many records the log may hold beyond twice the number of VIPs.
const slack = 1024

// compact drops superseded records and removals once they make up more than
// half of the log, so that the log stays of the order of the number of VIPs
// whatever readers do, at a constant cost per change.
func (t *Table) compact() {
	if len(t.log) <= 2*t.live+slack {
		return
	}
	kept := make([]entry, 0, 2*t.live+slack)
	for _, e := range t.log {
		switch {
		case e.record == nil:
		case e.removed:
			t.dropped = max(t.dropped, e.revision)
			delete(t.index, e.VIP)
		default:
			t.index[e.VIP] = len(kept)
			kept = append(kept, e)
		}
	}
	t.log = kept
}

// Heartbeat tells every watch that the load balancer still vouches for the
// table. Only the loop that evaluates readiness may call it.
func (t *Table) Heartbeat() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.revision == 0 {
		return
	}
	t.alive = time.Now()
	t.beats++
	t.wake()
}

// GoAway tells every watch, also later ones, that the load balancer forwards
// for drainFor longer and then stops. Calls after the first do nothing. The
// owner goes on committing and beating.
//
// It counts as a decision: a synced watch hears of it before it hears of the
// revision, so that a frontend which reports to have applied that has taken it in.
func (t *Table) GoAway(drainFor time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.away {
		return
	}
	t.away, t.awayEnd = true, time.Now().Add(drainFor)
	if t.revision > 0 {
		t.revision++
	}
	t.wake()
}

func (t *Table) wake() {
	for c := range t.cursors {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// Lease returns the lease of a fresh message.
func (t *Table) Lease() time.Duration { return t.lease }

// Position returns the position of the newest decision; its revision is 0
// before the first.
func (t *Table) Position() Position {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Position{t.instance, t.revision}
}

// Get returns the readiness of one VIP.
func (t *Table) Get(v vip.VIP) (VIPReadiness, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, ok := t.index[v]
	if !ok || t.log[i].removed {
		return VIPReadiness{}, false
	}
	return t.log[i].VIPReadiness, true
}

// TableState is the whole table at one moment.
type TableState struct {
	Position Position
	Synced   bool
	// LeaseLeft is how much longer the last sign of life is valid; 0 when the
	// load balancer is silent.
	LeaseLeft time.Duration
	GoingAway bool
	// VIPs is ordered by vip.Compare.
	VIPs []VIPReadiness
}

// State returns the whole table. Unlike all other methods it costs time of the
// order of the number of VIPs, most of it without holding anybody up.
func (t *Table) State() TableState {
	t.mu.Lock()
	left, _ := t.left(time.Now())
	s := TableState{Position: Position{t.instance, t.revision}, Synced: t.synced, LeaseLeft: left, GoingAway: t.away}
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

// left returns how long what the table says now stays valid: the lease, less
// the age of the last sign of life. A watch that opens, or a reader that wakes
// up, long after the loop hung is thus not told anything. The time is rounded up
// to a hundredth of the lease so that it reads well in traces.
func (t *Table) left(now time.Time) (time.Duration, bool) {
	if t.revision == 0 {
		return 0, false
	}
	left := t.lease - now.Sub(t.alive)
	if left < minLease {
		return 0, false
	}
	if grain := t.lease / 100; grain > 0 {
		left = min(t.lease, (left+grain-1)/grain*grain)
	}
	return left, true
}
