package gate

import (
	"cmp"
	"container/heap"
	"maps"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// finalGrace is how long before the end of the grace period a stale VIP is de-preferred.
const finalGrace = time.Second

// Gate is the state machine. Create one with [New].
type Gate struct {
	options Options
	vips    map[vip.VIP]*entry
	// entries holds the values of vips as a slice. A change of the shared conditions re-evaluates
	// every VIP, and iterating over a map is several times slower.
	entries []*entry
	// next is the expected index of the next VIP: the load balancer lists VIPs in the same order.
	next int
	// routed holds the VIPs whose source routing is installed in the kernel. It includes VIPs that
	// are not configured yet: Route and Configure are called in any order.
	routed vip.Set

	// The load balancer.
	complete   uint64 // counts complete updates
	instance   string
	revision   uint64
	synced     bool // a synced snapshot was received
	streamOpen bool // a synced stream is open: lbLease determines the freshness
	lbLease    lease
	graceStart time.Time // when the state became stale, while no stream is open
	grace      time.Duration
	lbDrainEnd time.Time // zero: the load balancer is not stopping

	// The gateways.
	gatewayLease lease
	gateways     Gateways
	announcer    Announcer

	weighs bool // decisions have weights

	// The frontend itself.
	stopEnd time.Time // zero: not stopping
	// operatorDrain returns the end of the drain time of an operator's drain; zero without a drain.
	operatorDrain func(vip.VIP) time.Time

	// last holds the conditions of the last Evaluate. A change re-evaluates every VIP.
	last conditions
	// dirty holds the entries whose inputs changed since the last Evaluate, without duplicates.
	dirty      []*entry
	timers     timerHeap
	changes    []Change
	attraction [len(vip.Families)]Attraction
}

// entry is one VIP that is configured or in the load balancer's state.
type entry struct {
	vip              vip.VIP
	index            int    // in Gate.entries
	listed           uint64 // number of the last complete update that contains the VIP
	dirty            bool   // in Gate.dirty
	configured       bool
	routed           bool
	reported         bool // state comes from synced data
	state            vip.State
	lastResort       bool      // with vip.NotReady
	suspected        bool      // with vip.Ready
	wasReady         bool      // the load balancer reported it ready since it was configured
	drainEnd         time.Time // with vip.Draining
	leaveEnd         time.Time // end of the drain of a VIP that leaves the configuration; or zero
	operatorDrainEnd time.Time // zero: not drained by an operator
	flaps            flaps
	riseAt           time.Time // end of the flap damping
	weight           uint32    // newest, reported by the load balancer
	nextWeight       time.Time // when the weight of decision may change alone
	weightTimer      time.Time // newest timer for nextWeight
	decision         Decision
	// attracts is the advertisement under the assumption that a gateway is always up.
	attracts Advertisement
}

// conditions are the inputs shared by all VIPs.
type conditions struct {
	freshness  Freshness
	finalGrace bool // the last second of the grace period
	paths      [len(vip.Families)]path
	stop       phase
	lbDrain    phase
}

// path is the usability of a family's gateways.
type path uint8

const (
	noGateway   path = iota // no gateway is up
	notAccepted             // the routing daemon accepts no VIPs for the gateways that are up
	usable
)

// phase is the progress of a drain.
type phase uint8

const (
	noDrain phase = iota
	draining
	drainOver
)

func phaseOf(end, now time.Time) phase {
	switch {
	case end.IsZero():
		return noDrain
	case now.Before(end):
		return draining
	}
	return drainOver
}

// New returns a Gate without VIPs.
func New(options Options) *Gate {
	none := func(vip.VIP) time.Time { return time.Time{} }
	options.Silence = cmp.Or(options.Silence, usualSilence)
	return &Gate{options: options, vips: map[vip.VIP]*entry{}, operatorDrain: none}
}

// Configure replaces the set of VIPs of the attractor.
func (gate *Gate) Configure(vips []vip.VIP) {
	configured := vip.NewSet(vips...)
	for _, entry := range gate.entries {
		if entry.configured && !configured.Has(entry.vip) {
			entry.configured, entry.routed, entry.leaveEnd = false, false, time.Time{}
			entry.wasReady = false
			gate.markDirty(entry)
		}
	}
	for _, v := range vips {
		if entry := gate.entry(v); !entry.configured {
			entry.configured, entry.routed = true, gate.routed.Has(v)
			entry.wasReady = entry.state == vip.Ready
			gate.setOperatorDrain(entry)
			gate.markDirty(entry)
		}
	}
}

// Route replaces the set of VIPs whose source routing is installed in the kernel. The set must
// not be modified afterwards. VIPs that are configured later use it, too.
func (gate *Gate) Route(confirmed vip.Set) {
	gate.routed = confirmed
	for _, entry := range gate.entries {
		if routed := entry.configured && confirmed.Has(entry.vip); routed != entry.routed {
			entry.routed = routed
			gate.markDirty(entry)
		}
	}
}

// Gateways sets the state of the gateway sessions.
func (gate *Gate) Gateways(gateways Gateways) {
	was := gate.gateways.Exported
	gate.gateways = gateways
	for f, exported := range gateways.Exported {
		if (exported == nil) != (was[f] == nil) || !maps.Equal(exported, was[f]) {
			gate.markFamilyDirty(vip.Family(f))
		}
	}
	if !gateways.At.IsZero() {
		gate.gatewayLease.renew(gateways.At.Add(maxPollInterval + gate.options.Silence))
	}
}

// Stalled moves the end of the validity of the sessions' state by the duration of a stall of this
// process until now, in which it could not be read, at most to the end for a state read now.
func (gate *Gate) Stalled(now time.Time, d time.Duration) {
	gate.gatewayLease.stall(d, now.Add(maxPollInterval+gate.options.Silence))
}

// Announcer sets the state of the announcer's session.
func (gate *Gate) Announcer(announcer Announcer) { gate.announcer = announcer }

// UpdateLB applies an update of the load balancer's state. An update without an instance precedes
// the first synced data and is ignored.
func (gate *Gate) UpdateLB(now time.Time, update LBUpdate) {
	if update.Instance == "" {
		return
	}
	// Only a change that a live load balancer reports itself is a flap: a restart, a lost lease or a
	// new configuration is not.
	countFlap := update.Instance == gate.instance && gate.Freshness(now) == Live && !update.Shared
	gate.instance, gate.revision, gate.synced, gate.grace = update.Instance, update.Revision, true, update.Grace
	gate.lbDrainEnd = time.Time{}
	if update.GoingAway {
		gate.lbDrainEnd = update.DrainEnd
	}
	gate.streamOpen = update.Live
	if update.Live {
		gate.lbLease.renew(update.LeaseEnd)
	} else {
		gate.graceStart = earlier(update.LeaseEnd, update.EndedAt)
	}
	// VIPs that a complete update does not list are not ready.
	if update.Complete {
		gate.complete++
	}
	for _, state := range update.VIPs {
		entry := gate.entry(state.VIP)
		entry.listed = gate.complete
		gate.setState(now, entry, state, countFlap && !state.Reconfigured)
	}
	if update.Complete {
		for _, entry := range gate.entries {
			if entry.listed != gate.complete {
				gate.setState(now, entry, VIPState{VIP: entry.vip, State: vip.NotReady}, countFlap)
			}
		}
	}
	for _, v := range update.Removed {
		// A VIP is removed by a new configuration only.
		gate.setState(now, gate.entry(v), VIPState{VIP: v, State: vip.NotReady}, false)
	}
}

// Stop begins the drain of the whole frontend. It cannot be undone.
func (gate *Gate) Stop(now time.Time) {
	if gate.stopEnd.IsZero() {
		gate.stopEnd = now.Add(gate.options.DrainTime)
	}
}

// SkipDrains ends the drain of the frontend, so that the next Evaluate withdraws.
func (gate *Gate) SkipDrains(now time.Time) {
	if !gate.stopEnd.IsZero() {
		gate.stopEnd = now
	}
}

// OperatorDrains replaces the drains by operators, also of VIPs that are configured later. end must
// be a pure function: it returns the end of the drain time of a VIP, or zero.
func (gate *Gate) OperatorDrains(end func(vip.VIP) time.Time) {
	gate.operatorDrain = end
	for _, entry := range gate.entries {
		gate.setOperatorDrain(entry)
	}
}

func (gate *Gate) setOperatorDrain(entry *entry) {
	if end := gate.operatorDrain(entry.vip); !end.Equal(entry.operatorDrainEnd) {
		entry.operatorDrainEnd = end
		gate.scheduleDirty(end, entry.vip)
		gate.markDirty(entry)
	}
}

// Drain begins the drain of VIPs that leave the configuration. VIPs that are not configured or that
// already leave are skipped.
func (gate *Gate) Drain(now time.Time, vips ...vip.VIP) {
	for _, v := range vips {
		if entry, ok := gate.vips[v]; ok && entry.configured && entry.leaveEnd.IsZero() {
			entry.leaveEnd = now.Add(gate.options.DrainTime)
			gate.scheduleDirty(entry.leaveEnd, v)
			gate.markDirty(entry)
		}
	}
}

// Undrain ends these drains.
func (gate *Gate) Undrain(vips ...vip.VIP) {
	for _, v := range vips {
		if entry, ok := gate.vips[v]; ok && !entry.leaveEnd.IsZero() {
			entry.leaveEnd = time.Time{}
			gate.markDirty(entry)
		}
	}
}

// Evaluate returns every VIP whose decision changed at now. The slice is valid until the next call.
func (gate *Gate) Evaluate(now time.Time) []Change {
	gate.changes = gate.changes[:0]
	current := gate.observe(now)
	for len(gate.timers) > 0 && !now.Before(gate.timers[0].at) {
		if entry, ok := gate.vips[heap.Pop(&gate.timers).(timer).vip]; ok {
			gate.markDirty(entry)
		}
	}
	if current != gate.last {
		gate.last = current
		for i := 0; i < len(gate.entries); {
			if entry := gate.entries[i]; gate.decide(now, entry) {
				i++
			} else {
				gate.remove(entry) // moves the last entry to i
			}
		}
	} else {
		for _, entry := range gate.dirty {
			if !gate.decide(now, entry) {
				gate.remove(entry)
			}
		}
	}
	clear(gate.dirty) // releases removed entries to the garbage collector
	gate.dirty = gate.dirty[:0]
	return gate.changes
}

// Deadline returns when Evaluate can return a change without a new input; zero if never.
func (gate *Gate) Deadline(now time.Time) time.Time {
	var next time.Time
	consider := func(t time.Time) {
		if t.After(now) {
			next = earlier(next, t)
		}
	}
	consider(gate.gatewayLease.deadline(now))
	consider(gate.announcer.reconnectEnd())
	consider(gate.stopEnd)
	consider(gate.lbDrainEnd)
	if gate.synced {
		start := gate.graceStart
		if gate.streamOpen {
			start = gate.lbLease.end
			consider(gate.lbLease.deadline(now))
		}
		consider(start.Add(gate.grace - finalGrace))
		consider(start.Add(gate.grace))
	}
	if len(gate.timers) > 0 {
		consider(gate.timers[0].at)
		if !gate.timers[0].at.After(now) {
			return now
		}
	}
	return next
}

// Position returns the load balancer's instance and revision that the decisions are based on.
func (gate *Gate) Position() (instance string, revision uint64) { return gate.instance, gate.revision }

// Decision returns the decision on v as of the last Evaluate.
func (gate *Gate) Decision(v vip.VIP) Decision {
	if entry, ok := gate.vips[v]; ok {
		return entry.decision
	}
	return Decision{}
}

// Drained returns the VIPs that leave or that an operator drained, with the end of their drain.
func (gate *Gate) Drained() map[vip.VIP]time.Time {
	drained := map[vip.VIP]time.Time{}
	for _, entry := range gate.entries {
		if end := earlier(entry.leaveEnd, entry.operatorDrainEnd); !end.IsZero() {
			drained[entry.vip] = end
		}
	}
	return drained
}

// setState stores the load balancer's state of one VIP. A change from ready to not ready counts
// as a flap only if countFlap is set: the same live instance reported both, of this VIP. A last
// resort is no flap, since the VIP is not withdrawn.
func (gate *Gate) setState(now time.Time, entry *entry, state VIPState, countFlap bool) {
	if entry.weight != state.Weight {
		entry.weight = state.Weight
		if gate.weighs {
			gate.markDirty(entry)
		}
	}
	if entry.reported && entry.state == state.State && entry.lastResort == state.LastResort &&
		entry.suspected == state.Suspected && entry.drainEnd.Equal(state.DrainEnd) {
		return
	}
	switch {
	case entry.state == vip.Ready && state.State == vip.NotReady && countFlap && !state.LastResort:
		entry.flaps = entry.flaps.add(now)
	case entry.state == vip.NotReady && state.State == vip.Ready && !gate.options.NoFlapBackoff:
		entry.riseAt = time.Time{}
		// A last resort is advertised already: damping must not withdraw it when it recovers.
		if wait := entry.flaps.wait(now); wait > 0 && !entry.lastResort {
			entry.riseAt = now.Add(wait)
			gate.scheduleDirty(entry.riseAt, entry.vip)
		}
	}
	entry.reported, entry.state, entry.drainEnd = true, state.State, state.DrainEnd
	entry.lastResort, entry.suspected = state.LastResort, state.Suspected
	entry.wasReady = entry.configured && (entry.wasReady || state.State == vip.Ready)
	if state.State == vip.Draining {
		gate.scheduleDirty(entry.drainEnd, entry.vip)
	}
	gate.markDirty(entry)
}

// entry returns the entry of v and creates it if missing. After the first synced snapshot, a VIP
// that is absent from it is not ready.
func (gate *Gate) entry(v vip.VIP) *entry {
	if gate.next < len(gate.entries) && gate.entries[gate.next].vip == v {
		gate.next++
		return gate.entries[gate.next-1]
	}
	e, ok := gate.vips[v]
	if !ok {
		e = &entry{vip: v, index: len(gate.entries), reported: gate.synced}
		gate.vips[v], gate.entries = e, append(gate.entries, e)
	}
	gate.next = e.index + 1
	return e
}

// remove deletes entry; the last entry takes its place.
func (gate *Gate) remove(entry *entry) {
	last := len(gate.entries) - 1
	gate.entries[entry.index] = gate.entries[last]
	gate.entries[entry.index].index = entry.index
	gate.entries[last] = nil
	gate.entries = gate.entries[:last]
	delete(gate.vips, entry.vip)
}

func (gate *Gate) markFamilyDirty(family vip.Family) {
	for _, entry := range gate.entries {
		if entry.vip.Family() == family {
			gate.markDirty(entry)
		}
	}
}

func (gate *Gate) markDirty(entry *entry) {
	if !entry.dirty {
		entry.dirty = true
		gate.dirty = append(gate.dirty, entry)
	}
}

func (gate *Gate) scheduleDirty(at time.Time, v vip.VIP) { heap.Push(&gate.timers, timer{at, v}) }

// decide updates the decision on entry. It reports whether it is still used. The caller removes
// unused entries, neither configured nor in the load balancer's state, to bound the memory.
func (gate *Gate) decide(now time.Time, entry *entry) (used bool) {
	entry.dirty = false
	decision := gate.evaluateTable(now, entry, entry.decision.Advertisement, gate.last.paths[entry.vip.Family()])
	attracts := decision.Advertisement
	// A second evaluation with a usable path is needed only for these reasons: the rows above
	// NoGateway depend on neither the path nor the current advertisement.
	if decision.Reason == NoGateway || decision.Reason == NotAccepted ||
		decision.Reason > NotAccepted && entry.attracts != entry.decision.Advertisement {
		attracts = gate.evaluateTable(now, entry, entry.attracts, usable).Advertisement
	}
	gate.count(entry, decision.Reason != NotConfigured, attracts)
	decision.Weight = gate.weigh(now, entry, decision)
	if decision != entry.decision {
		gate.changes = append(gate.changes, Change{VIP: entry.vip, From: entry.decision, To: decision})
		entry.decision = decision
	}
	return entry.configured || entry.state != vip.NotReady
}

// earlier returns the earlier of two times; zero means unknown.
func earlier(a, b time.Time) time.Time {
	if b.IsZero() || (!a.IsZero() && a.Before(b)) {
		return a
	}
	return b
}

// timer marks a VIP dirty at a time. A timer is never canceled: when it is obsolete, Evaluate
// reaches the same decision from the same inputs.
type timer struct {
	at  time.Time
	vip vip.VIP
}

// timerHeap is a min-heap for container/heap.
type timerHeap []timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h timerHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)        { *h = append(*h, x.(timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}
