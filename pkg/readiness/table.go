package readiness

import (
	"cmp"
	"crypto/rand"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
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

// Decision is a decision of the load balancer. Each VIP changes atomically; see Table.Commit.
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
	// needs a snapshot. superseded is the newest revision of any other compacted entry. A watch that
	// has not sent this revision sends all entries as one revision; see firstRevisions.
	dropped    uint64
	superseded uint64
	renewedAt  time.Time // last commit or heartbeat
	heartbeats uint64
	goingAway  bool
	drainEnd   time.Time
	cursors    map[*cursor]struct{}

	held atomic.Pointer[string]
}

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
	text    string  // of the VIP, which each message has
}

// NewTable returns an empty table, which sends nothing before the first decision.
func NewTable(options TableOptions) *Table {
	table := &Table{
		instance: cmp.Or(options.InstanceID, rand.Text()), lease: cmp.Or(options.Lease, DefaultLease),
		index: make(map[vip.VIP]*newest), cursors: make(map[*cursor]struct{}),
	}
	table.held.Store(new(string))
	if options.StaleGrace > 0 {
		table.staleGrace = durationpb.New(options.StaleGrace)
	}
	return table
}

// SetHeld sets the description of removals of targets that wait for a confirmation, or "". Later
// messages have it, cut off at [MaxDetailBytes].
func (table *Table) SetHeld(text string) {
	text = cleanDetail(text)
	table.held.Store(&text)
}

// The number of VIPs in the first revision of a decision, and the limit up to which it doubles. A
// revision costs the frontend and BIRD a write, about as much as 100 VIPs.
const firstVIPs, maxRevisionVIPs = vipsPerPart, 8 * vipsPerPart

// Commit applies a decision, wakes every watch and renews the lease. It returns the revision, which
// advances only if the decision changed the table.
//
// A decision about many VIPs has several revisions, so that the frontend withdraws the first VIPs
// while the last are recorded. In between, a reader sees a part of the decision. Rises precede
// falls, so that a family never has fewer VIPs that are up than before or after. The first synced
// decision has one revision, because it ends the grace period of an earlier load balancer's VIPs.
func (table *Table) Commit(decision Decision) (revision uint64) {
	if decision.At.IsZero() {
		decision.At = time.Now()
	}
	first := decision.Synced && !table.Synced()
	changed, removed := decision.Changed, decision.Removed
	if len(changed) <= firstVIPs || first {
		return table.commit(&writer{table: table, at: decision.At}, changed, removed, decision.Synced)
	}
	changed = risesFirst(changed)
	parts := &writer{table: table, at: decision.At}
	for size := firstVIPs; len(changed) > 0; size = min(2*size, maxRevisionVIPs) {
		part := changed[:min(size, len(changed))]
		changed = changed[len(part):]
		table.commit(parts, part, nil, decision.Synced)
		// A watch that waits for the mutex would get it after 1 ms only (starvation mode of sync.Mutex).
		runtime.Gosched()
	}
	return table.commit(parts, nil, removed, decision.Synced)
}

// risesFirst returns the VIPs with those that are not ready last, otherwise in the same order.
func risesFirst(changed []VIPReadiness) []VIPReadiness {
	falls := func(readiness VIPReadiness) bool { return readiness.State == vip.NotReady }
	rises := func(readiness VIPReadiness) bool { return !falls(readiness) }
	if !slices.ContainsFunc(changed, falls) || !slices.ContainsFunc(changed, rises) {
		return changed
	}
	return slices.Concat(slices.DeleteFunc(slices.Clone(changed), falls), slices.DeleteFunc(slices.Clone(changed), rises))
}

// commit applies a part of a decision as one revision.
func (table *Table) commit(writer *writer, readiness []VIPReadiness, removed []vip.VIP, synced bool) (revision uint64) {
	table.mu.Lock()
	defer table.mu.Unlock()
	table.renewedAt = time.Now()
	next := table.revision + 1
	// The first decision counts even if it is empty: no watch sends anything before revision 1.
	changed := table.revision == 0
	writer.revision, writer.left = next, len(readiness)+len(removed)
	for i := range readiness {
		changed = writer.put(&readiness[i]) || changed
	}
	for _, v := range removed {
		changed = writer.remove(v) || changed
	}
	if synced && !table.synced {
		table.synced, changed = true, true
	}
	// Without a change the watches learn of the renewed lease by the next heartbeat.
	if !changed {
		return table.revision
	}
	table.revision = next
	table.compact()
	table.wakeAll()
	return table.revision
}

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
func (writer *writer) find(v vip.VIP) *newest {
	if writer.last != nil {
		if found := writer.last.next; found != nil && found.record != nil && found.VIP == v {
			writer.last = found
			return found
		}
	}
	found := writer.table.index[v]
	if found != nil {
		writer.follow(found)
	}
	return found
}

// follow records that n follows the previous VIP of the decision.
func (writer *writer) follow(slot *newest) {
	if writer.last != nil {
		writer.last.next = slot
	}
	writer.last = slot
}

// put records decided if it differs from the recorded value.
func (writer *writer) put(decided *VIPReadiness) bool {
	writer.left--
	readiness := *decided
	if readiness.Detail != writer.detail {
		writer.detail, writer.clean = readiness.Detail, cleanDetail(readiness.Detail)
	}
	readiness.Detail = writer.clean
	// A leftover drain end would make equal readiness differ.
	if readiness.State != vip.Draining {
		readiness.DrainEnd = time.Time{}
	}
	table, slot := writer.table, writer.find(readiness.VIP)
	// A removed VIP that is not compacted yet starts over.
	var old *record
	if slot != nil && !slot.removed {
		old = slot.record
	}
	if readiness.Since.IsZero() {
		readiness.Since = writer.at
		if old != nil && old.State == readiness.State {
			readiness.Since = old.Since
		}
	}
	if old != nil && old.equal(&readiness) {
		return false
	}
	if old == nil {
		table.live++
	} else if old.State == vip.Ready {
		table.ready--
	}
	if readiness.State == vip.Ready {
		table.ready++
	}
	writer.add(slot, &readiness, false)
	return true
}

// remove records the removal of v, unless v is not in the table.
func (writer *writer) remove(v vip.VIP) bool {
	writer.left--
	table, slot := writer.table, writer.find(v)
	if slot == nil || slot.removed {
		return false
	}
	table.live--
	if slot.State == vip.Ready {
		table.ready--
	}
	writer.add(slot, &VIPReadiness{VIP: v}, true)
	return true
}

// recordsPerBlock is the number of records in one allocation of 2 KiB. Blocks are allocated only
// after a decision has changed more than one in singleRecords VIPs. A block stays in memory as
// long as one of its records is the newest of a VIP: if decisions about few VIPs allocated blocks,
// most records in memory would be superseded.
const (
	recordsPerBlock = 13
	singleRecords   = 8
)

// add appends a record to the log. slot is the index entry of the VIP, nil for a new VIP.
func (writer *writer) add(slot *newest, readiness *VIPReadiness, removed bool) {
	table := writer.table
	var text string
	if slot != nil && slot.record != nil {
		text = slot.text
	} else {
		text = readiness.VIP.String()
	}
	if slot == nil {
		slot = new(newest)
		table.index[readiness.VIP] = slot
		writer.follow(slot)
	} else {
		// Supersede the entry in place: finding it again would need a scan of the log.
		table.log[slot.at].record = nil
	}
	if len(writer.free) == 0 {
		size := 1
		if writer.added > table.live/singleRecords {
			size = min(writer.left+1, recordsPerBlock)
		}
		writer.free = make([]record, size)
	}
	writer.added++
	added := &writer.free[0]
	writer.free = writer.free[1:]
	*added = record{*readiness, removed, slot, text}
	slot.record, slot.at = added, len(table.log)
	table.log = append(table.log, entry{writer.revision, added})
}

// logSlack is the number of records that the log may hold in excess of twice the number of VIPs.
const logSlack = 1024

// compact discards superseded records and removals once they exceed half of the log. The size of
// the log stays proportional to the number of VIPs, at an amortized constant cost per change.
func (table *Table) compact() {
	if len(table.log) <= 2*table.live+logSlack {
		return
	}
	kept := table.log[:0] // in place: batches hold copies of the entries
	if limit := 2*table.live + logSlack; cap(table.log) > 2*limit {
		kept = make([]entry, 0, limit)
	}
	for _, entry := range table.log {
		switch {
		case entry.record == nil:
			table.superseded = max(table.superseded, entry.revision)
		case entry.removed:
			table.dropped = max(table.dropped, entry.revision)
			delete(table.index, entry.VIP)
			*entry.newest = newest{} // also breaks chains of next, which would retain removed VIPs
		default:
			entry.newest.at = len(kept)
			kept = append(kept, entry)
		}
	}
	clear(table.log[len(kept):])
	table.log = kept
}

// Heartbeat renews the lease of every watch. Only the loop that evaluates readiness may call it.
func (table *Table) Heartbeat() {
	table.mu.Lock()
	defer table.mu.Unlock()
	if table.revision == 0 {
		return
	}
	table.renewedAt = time.Now()
	table.heartbeats++
	table.wakeAll()
}

// GoAway announces to every present and future watch that the load balancer stops after drainFor.
// Commits and heartbeats continue. Only the first call has an effect. GoAway advances the revision,
// and a synced watch sends the announcement before the new revision: a frontend that reports this
// revision as applied has received the announcement.
func (table *Table) GoAway(drainFor time.Duration) {
	table.mu.Lock()
	defer table.mu.Unlock()
	if table.goingAway {
		return
	}
	table.goingAway, table.drainEnd = true, time.Now().Add(drainFor)
	if table.revision > 0 {
		table.revision++
	}
	table.wakeAll()
}

func (table *Table) wakeAll() {
	for cursor := range table.cursors {
		latest.Wake(cursor.wake)
	}
}

// Position returns the position of the newest decision; the revision is 0 before the first.
func (table *Table) Position() Position {
	table.mu.Lock()
	defer table.mu.Unlock()
	return Position{table.instance, table.revision}
}

// Synced reports whether any decision was synced.
func (table *Table) Synced() bool {
	table.mu.Lock()
	defer table.mu.Unlock()
	return table.synced
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
func (table *Table) State() TableState {
	table.mu.Lock()
	left, _ := table.leaseLeft(time.Now())
	state := TableState{
		Position: Position{table.instance, table.revision}, Synced: table.synced, LeaseLeft: left,
		GoingAway: table.goingAway,
	}
	log := slices.Clone(table.log)
	table.mu.Unlock()
	state.VIPs = make([]VIPReadiness, 0, len(log))
	for _, entry := range log {
		if entry.record != nil && !entry.removed {
			state.VIPs = append(state.VIPs, entry.VIPReadiness)
		}
	}
	slices.SortFunc(state.VIPs, func(a, b VIPReadiness) int { return vip.Compare(a.VIP, b.VIP) })
	return state
}

// leaseLeft returns the validity of a message sent at now: the lease minus the age of the last
// commit or heartbeat, rounded up to a hundredth of the lease for readable traces. ok is false
// before the first decision, and after the lease expired because the loop hangs: send nothing.
func (table *Table) leaseLeft(now time.Time) (left time.Duration, ok bool) {
	if table.revision == 0 {
		return 0, false
	}
	left = table.lease - now.Sub(table.renewedAt)
	if left < minLease {
		return 0, false
	}
	if grain := table.lease / 100; grain > 0 {
		left = min(table.lease, (left+grain-1)/grain*grain)
	}
	return left, true
}

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
