package gate

import (
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

	// The frontend itself.
	stopEnd time.Time // zero: not stopping

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
	drainEnd         time.Time // with vip.Draining
	operatorDrainEnd time.Time // zero: not drained
	flaps            flaps
	riseAt           time.Time // end of the flap damping
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
func New(o Options) *Gate {
	return &Gate{options: o, vips: map[vip.VIP]*entry{}}
}

// Configure replaces the set of VIPs of the attractor.
func (g *Gate) Configure(vips []vip.VIP) {
	configured := vip.NewSet(vips...)
	for _, e := range g.entries {
		if e.configured && !configured.Has(e.vip) {
			e.configured, e.routed, e.operatorDrainEnd = false, false, time.Time{}
			g.markDirty(e)
		}
	}
	for _, v := range vips {
		if e := g.entry(v); !e.configured {
			e.configured, e.routed = true, g.routed.Has(v)
			g.markDirty(e)
		}
	}
}

// Route replaces the set of VIPs whose source routing is installed in the kernel. The set must
// not be modified afterwards. VIPs that are configured later use it, too.
func (g *Gate) Route(confirmed vip.Set) {
	g.routed = confirmed
	for _, e := range g.entries {
		if routed := e.configured && confirmed.Has(e.vip); routed != e.routed {
			e.routed = routed
			g.markDirty(e)
		}
	}
}

// Gateways sets the state of the gateway sessions.
func (g *Gate) Gateways(s Gateways) {
	was := g.gateways.Exported
	g.gateways = s
	for f, exported := range s.Exported {
		if (exported == nil) != (was[f] == nil) || !maps.Equal(exported, was[f]) {
			g.markFamilyDirty(vip.Family(f))
		}
	}
	if !s.At.IsZero() {
		g.gatewayLease.renew(s.At.Add(MaxSessionAge))
	}
}

// Announcer sets the state of the announcer's session.
func (g *Gate) Announcer(a Announcer) { g.announcer = a }

// UpdateLB applies an update of the load balancer's state. An update without an instance precedes
// the first synced data and is ignored.
func (g *Gate) UpdateLB(now time.Time, u LBUpdate) {
	if u.Instance == "" {
		return
	}
	countFlap := u.Instance == g.instance && g.Freshness(now) == Live && !u.Shared
	g.instance, g.revision, g.synced, g.grace = u.Instance, u.Revision, true, u.Grace
	g.lbDrainEnd = time.Time{}
	if u.GoingAway {
		g.lbDrainEnd = u.DrainEnd
	}
	g.streamOpen = u.Live
	if u.Live {
		g.lbLease.renew(u.LeaseEnd)
	} else {
		g.graceStart = earlier(u.LeaseEnd, u.EndedAt)
	}
	if u.Complete {
		g.complete++
	}
	for _, s := range u.VIPs {
		e := g.entry(s.VIP)
		e.listed = g.complete
		g.setState(now, e, s, countFlap)
	}
	if u.Complete {
		for _, e := range g.entries {
			if e.listed != g.complete {
				g.setState(now, e, VIPState{VIP: e.vip, State: vip.NotReady}, countFlap)
			}
		}
	}
	for _, v := range u.Removed {
		g.setState(now, g.entry(v), VIPState{VIP: v, State: vip.NotReady}, countFlap)
	}
}

// Stop begins the drain of the whole frontend. It cannot be undone.
func (g *Gate) Stop(now time.Time) {
	if g.stopEnd.IsZero() {
		g.stopEnd = now.Add(g.options.DrainTime)
	}
}

// SkipDrains ends the drain of the frontend, so that the next Evaluate withdraws.
func (g *Gate) SkipDrains(now time.Time) {
	if !g.stopEnd.IsZero() {
		g.stopEnd = now
	}
}

// Drain begins an operator's drain of VIPs. VIPs that are not configured or already drained are
// skipped.
func (g *Gate) Drain(now time.Time, vips ...vip.VIP) {
	for _, v := range vips {
		if e, ok := g.vips[v]; ok && e.configured && e.operatorDrainEnd.IsZero() {
			e.operatorDrainEnd = now.Add(g.options.DrainTime)
			g.scheduleDirty(e.operatorDrainEnd, v)
			g.markDirty(e)
		}
	}
}

// Undrain ends operators' drains.
func (g *Gate) Undrain(vips ...vip.VIP) {
	for _, v := range vips {
		if e, ok := g.vips[v]; ok && !e.operatorDrainEnd.IsZero() {
			e.operatorDrainEnd = time.Time{}
			g.markDirty(e)
		}
	}
}

// Evaluate returns every VIP whose decision changed at now. The slice is valid until the next
// call.
func (g *Gate) Evaluate(now time.Time) []Change {
	g.changes = g.changes[:0]
	current := g.observe(now)
	for len(g.timers) > 0 && !now.Before(g.timers[0].at) {
		if e, ok := g.vips[heap.Pop(&g.timers).(timer).vip]; ok {
			g.markDirty(e)
		}
	}
	if current != g.last {
		g.last = current
		for i := 0; i < len(g.entries); {
			if e := g.entries[i]; g.decide(now, e) {
				i++
			} else {
				g.remove(e) // moves the last entry to i
			}
		}
	} else {
		for _, e := range g.dirty {
			if !g.decide(now, e) {
				g.remove(e)
			}
		}
	}
	clear(g.dirty) // releases removed entries to the garbage collector
	g.dirty = g.dirty[:0]
	return g.changes
}

// Deadline returns when Evaluate can return a change without a new input; zero if never.
func (g *Gate) Deadline(now time.Time) time.Time {
	var next time.Time
	consider := func(t time.Time) {
		if t.After(now) {
			next = earlier(next, t)
		}
	}
	consider(g.gatewayLease.deadline(now))
	consider(g.announcer.reconnectEnd())
	consider(g.stopEnd)
	consider(g.lbDrainEnd)
	if g.synced {
		start := g.graceStart
		if g.streamOpen {
			start = g.lbLease.end
			consider(g.lbLease.deadline(now))
		}
		consider(start.Add(g.grace - finalGrace))
		consider(start.Add(g.grace))
	}
	if len(g.timers) > 0 {
		consider(g.timers[0].at)
		if !g.timers[0].at.After(now) {
			return now
		}
	}
	return next
}

// Position returns the load balancer's instance and revision that the decisions are based on.
func (g *Gate) Position() (instance string, revision uint64) { return g.instance, g.revision }

// Decision returns the decision on v as of the last Evaluate.
func (g *Gate) Decision(v vip.VIP) Decision {
	if e, ok := g.vips[v]; ok {
		return e.decision
	}
	return Decision{}
}

// Drained returns the VIPs that an operator drained, with the end of their drain time.
func (g *Gate) Drained() map[vip.VIP]time.Time {
	drained := map[vip.VIP]time.Time{}
	for _, e := range g.entries {
		if !e.operatorDrainEnd.IsZero() {
			drained[e.vip] = e.operatorDrainEnd
		}
	}
	return drained
}

// setState stores the load balancer's state of one VIP. A change from ready to not ready counts
// as a flap only if countFlap is set: the same live instance reported both, of this VIP.
func (g *Gate) setState(now time.Time, e *entry, s VIPState, countFlap bool) {
	if e.reported && e.state == s.State && e.drainEnd.Equal(s.DrainEnd) {
		return
	}
	switch {
	case e.state == vip.Ready && s.State == vip.NotReady && countFlap:
		e.flaps = e.flaps.add(now)
	case e.state == vip.NotReady && s.State == vip.Ready && !g.options.NoFlapBackoff:
		e.riseAt = time.Time{}
		if wait := e.flaps.wait(now); wait > 0 {
			e.riseAt = now.Add(wait)
			g.scheduleDirty(e.riseAt, e.vip)
		}
	}
	e.reported, e.state, e.drainEnd = true, s.State, s.DrainEnd
	if s.State == vip.Draining {
		g.scheduleDirty(e.drainEnd, e.vip)
	}
	g.markDirty(e)
}

// entry returns the entry of v and creates it if missing. After the first synced snapshot, a VIP
// that is absent from it is not ready.
func (g *Gate) entry(v vip.VIP) *entry {
	e, ok := g.vips[v]
	if !ok {
		e = &entry{vip: v, index: len(g.entries), reported: g.synced}
		g.vips[v], g.entries = e, append(g.entries, e)
	}
	return e
}

// remove deletes e; the last entry takes its place.
func (g *Gate) remove(e *entry) {
	last := len(g.entries) - 1
	g.entries[e.index] = g.entries[last]
	g.entries[e.index].index = e.index
	g.entries[last] = nil
	g.entries = g.entries[:last]
	delete(g.vips, e.vip)
}

func (g *Gate) markFamilyDirty(f vip.Family) {
	for _, e := range g.entries {
		if e.vip.Family() == f {
			g.markDirty(e)
		}
	}
}

func (g *Gate) markDirty(e *entry) {
	if !e.dirty {
		e.dirty = true
		g.dirty = append(g.dirty, e)
	}
}

func (g *Gate) scheduleDirty(at time.Time, v vip.VIP) { heap.Push(&g.timers, timer{at, v}) }

// decide updates the decision on e. It reports whether e is still used. The caller removes unused
// entries, which are neither configured nor in the load balancer's state, to bound the memory.
func (g *Gate) decide(now time.Time, e *entry) (used bool) {
	e.dirty = false
	to := g.evaluateTable(now, e, e.decision.Advertisement, g.last.paths[e.vip.Family()])
	attracts := to.Advertisement
	// A second evaluation with a usable path is needed only for these reasons: the rows above
	// NoGateway depend on neither the path nor the current advertisement.
	if to.Reason == NoGateway || to.Reason == NotAccepted ||
		to.Reason > NotAccepted && e.attracts != e.decision.Advertisement {
		attracts = g.evaluateTable(now, e, e.attracts, usable).Advertisement
	}
	g.count(e, to.Reason != NotConfigured, attracts)
	if to != e.decision {
		g.changes = append(g.changes, Change{VIP: e.vip, From: e.decision, To: to})
		e.decision = to
	}
	return e.configured || e.state != vip.NotReady
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
