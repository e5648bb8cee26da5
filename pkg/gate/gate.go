package gate

import (
	"container/heap"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// finalGrace is how long before the end of the grace period a stale VIP is de-preferred.
const finalGrace = time.Second

// Gate is the state machine. Create one with [New].
type Gate struct {
	options Options
	vips    map[vip.VIP]*entry
	// routed holds the VIPs whose source routing is installed in the kernel. It includes VIPs that
	// are not configured yet: Route and Configure are called in any order.
	routed vip.Set

	// The load balancer.
	instance   string
	revision   uint64
	synced     bool // a synced snapshot was received
	streamOpen bool // a synced stream is open: its lease decides
	lbLease    lease
	graceStart time.Time // when the state became stale, while no stream is open
	grace      time.Duration
	lbDrainEnd time.Time // zero: the load balancer is not stopping

	// The gateways.
	gatewayLease lease
	gatewaysUp   [len(vip.Families)]bool

	// The frontend itself.
	stopEnd time.Time // zero: not stopping

	// last holds the conditions of the last Evaluate: a change makes every VIP dirty.
	last       conditions
	dirty      vip.Set
	timers     timerHeap
	changes    []Change
	attraction [len(vip.Families)]Attraction
}

// entry is one VIP that is configured or in the load balancer's state.
type entry struct {
	vip              vip.VIP
	configured       bool
	routed           bool
	reported         bool // in synced data: state is known
	state            vip.State
	drainEnd         time.Time // with vip.Draining
	operatorDrainEnd time.Time // zero: not drained
	flaps            flaps
	riseAt           time.Time // end of the flap damping
	decision         Decision
	// attracts is the advertisement if a gateway were always up.
	attracts Advertisement
}

// conditions are the inputs that concern every VIP.
type conditions struct {
	freshness  Freshness
	finalGrace bool // the last second of the grace period
	up         [len(vip.Families)]bool
	stop       phase
	lbDrain    phase
}

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
	return &Gate{options: o, vips: map[vip.VIP]*entry{}, dirty: vip.Set{}}
}

// Configure replaces the set of VIPs of the attractor.
func (g *Gate) Configure(vips []vip.VIP) {
	configured := vip.NewSet(vips...)
	for v, e := range g.vips {
		if e.configured && !configured.Has(v) {
			e.configured, e.routed, e.operatorDrainEnd = false, false, time.Time{}
			g.markDirty(v)
		}
	}
	for v := range configured {
		if e := g.entry(v); !e.configured {
			e.configured, e.routed = true, g.routed.Has(v)
			g.markDirty(v)
		}
	}
}

// Route replaces the set of VIPs whose source routing is installed in the kernel. The set must not
// be modified afterwards. VIPs that are configured later use it, too.
func (g *Gate) Route(confirmed vip.Set) {
	g.routed = confirmed
	for v, e := range g.vips {
		if routed := e.configured && confirmed.Has(v); routed != e.routed {
			e.routed = routed
			g.markDirty(v)
		}
	}
}

// Gateways sets the state of the gateway sessions.
func (g *Gate) Gateways(s Gateways) {
	g.gatewaysUp = s.Up
	if !s.At.IsZero() {
		g.gatewayLease.renew(s.At.Add(MaxSessionAge))
	}
}

// UpdateLB applies an update of the load balancer's state. An update without an instance precedes
// the first synced data and is ignored.
func (g *Gate) UpdateLB(now time.Time, u LBUpdate) {
	if u.Instance == "" {
		return
	}
	sameLB := u.Instance == g.instance && g.Freshness(now) == Live
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
		listed := make(vip.Set, len(u.VIPs))
		for _, s := range u.VIPs {
			listed[s.VIP] = struct{}{}
		}
		for v, e := range g.vips {
			if !listed.Has(v) {
				g.setState(now, e, VIPState{VIP: v, State: vip.NotReady}, sameLB)
			}
		}
	}
	for _, s := range u.VIPs {
		g.setState(now, g.entry(s.VIP), s, sameLB)
	}
	for _, v := range u.Removed {
		g.setState(now, g.entry(v), VIPState{VIP: v, State: vip.NotReady}, sameLB)
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
			g.markDirty(v)
		}
	}
}

// Undrain ends operators' drains.
func (g *Gate) Undrain(vips ...vip.VIP) {
	for _, v := range vips {
		if e, ok := g.vips[v]; ok && !e.operatorDrainEnd.IsZero() {
			e.operatorDrainEnd = time.Time{}
			g.markDirty(v)
		}
	}
}

// Evaluate returns every VIP whose decision changed at now. The slice is valid until the next call.
func (g *Gate) Evaluate(now time.Time) []Change {
	g.changes = g.changes[:0]
	current := g.observe(now)
	for len(g.timers) > 0 && !now.Before(g.timers[0].at) {
		g.markDirty(heap.Pop(&g.timers).(timer).vip)
	}
	if current != g.last {
		g.last = current
		for _, e := range g.vips {
			g.decide(now, e)
		}
	} else {
		for v := range g.dirty {
			if e, ok := g.vips[v]; ok {
				g.decide(now, e)
			}
		}
	}
	// A large map is replaced: a Go map keeps its buckets, and iterating over them would slow down
	// every later change of one VIP.
	if len(g.dirty) > 64 {
		g.dirty = vip.Set{}
	}
	clear(g.dirty)
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
	for v, e := range g.vips {
		if !e.operatorDrainEnd.IsZero() {
			drained[v] = e.operatorDrainEnd
		}
	}
	return drained
}

// setState stores the load balancer's state of one VIP. A change from ready to not ready counts as
// a flap only if countFlap is set: the same live instance reported both.
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
	g.markDirty(e.vip)
}

// entry returns the entry of v and creates it if missing. After the first synced snapshot, a VIP
// that is absent from it is not ready.
func (g *Gate) entry(v vip.VIP) *entry {
	e, ok := g.vips[v]
	if !ok {
		e = &entry{vip: v, reported: g.synced}
		g.vips[v] = e
	}
	return e
}

func (g *Gate) markDirty(v vip.VIP) { g.dirty[v] = struct{}{} }

func (g *Gate) scheduleDirty(at time.Time, v vip.VIP) { heap.Push(&g.timers, timer{at, v}) }

// decide updates the decision on e. An entry that is neither configured nor in the load balancer's
// state is deleted, which bounds the memory.
func (g *Gate) decide(now time.Time, e *entry) {
	up := g.last.up[e.vip.Family()]
	to := g.evaluateTable(now, e, e.decision.Advertisement, up)
	attracts := to.Advertisement
	if !up || e.attracts != e.decision.Advertisement { // otherwise the result is the same
		attracts = g.evaluateTable(now, e, e.attracts, true).Advertisement
	}
	g.count(e, to.Reason != NotConfigured, attracts)
	if to != e.decision {
		g.changes = append(g.changes, Change{VIP: e.vip, From: e.decision, To: to})
		e.decision = to
	}
	if !e.configured && e.state == vip.NotReady {
		delete(g.vips, e.vip)
	}
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
