package gate

import (
	"container/heap"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// lastGasp is how long before the end of the grace a stale VIP is de-preferred.
const lastGasp = time.Second

// Gate is the state machine. Make one with [New].
type Gate struct {
	options Options
	vips    map[vip.VIP]*entry
	// confirmed are the VIPs whose source routing is in the kernel, configured
	// here or not: which of the two is told first is not ours to say.
	confirmed vip.Set

	// The load balancer.
	instance   string
	revision   uint64
	everSynced bool // some synced snapshot was heard
	tracking   bool // a stream stands behind the words, so its lease counts
	lbLease    lease
	graceStart time.Time // when the word became stale, while not tracking
	grace      time.Duration
	goingAway  time.Time // end of the load balancer's drain; zero: it stays

	// The gateways.
	gatewayLease lease
	gatewaysUp   [len(vip.Families)]bool

	// The frontend itself.
	stopEnd time.Time // zero: not stopping

	// Globals as the last Evaluate saw them: a difference makes every VIP dirty.
	seen    globals
	dirty   map[vip.VIP]struct{}
	timers  timerHeap
	changes []Change
}

// entry is one VIP, configured or only heard of.
type entry struct {
	vip        vip.VIP
	configured bool
	routed     bool
	said       Said
	drainEnd   time.Time // with SaidDraining
	drained    time.Time // end of an operator's drain; zero: not drained
	flaps      flaps
	riseAt     time.Time // a flapping VIP may not rise earlier
	decision   Decision
}

// globals are the inputs that concern every VIP, as far as they decide.
type globals struct {
	freshness Freshness
	gasping   bool // the last second of the grace
	up        [len(vip.Families)]bool
	stop      phase
	away      phase
}

// phase is how far a drain is.
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

// New returns a Gate that knows no VIP.
func New(o Options) *Gate {
	return &Gate{options: o, vips: map[vip.VIP]*entry{}, dirty: map[vip.VIP]struct{}{}}
}

// Configure replaces the set of VIPs of the attractor.
func (g *Gate) Configure(vips []vip.VIP) {
	configured := vip.NewSet(vips...)
	for v, e := range g.vips {
		if e.configured && !configured.Has(v) {
			e.configured, e.routed, e.drained = false, false, time.Time{}
			g.touch(v)
		}
	}
	for v := range configured {
		if e := g.entry(v); !e.configured {
			e.configured, e.routed = true, g.confirmed.Has(v)
			g.touch(v)
		}
	}
}

// Route replaces the set of VIPs whose source routing is confirmed in the
// kernel. It counts for VIPs that are configured later, too. The set must not
// change any more.
func (g *Gate) Route(confirmed vip.Set) {
	g.confirmed = confirmed
	for v, e := range g.vips {
		if routed := e.configured && confirmed.Has(v); routed != e.routed {
			e.routed = routed
			g.touch(v)
		}
	}
}

// Gateways takes over the state of the gateway sessions.
func (g *Gate) Gateways(s Gateways) {
	g.gatewaysUp = s.Up
	if !s.At.IsZero() {
		g.gatewayLease.renew(s.At.Add(MaxSessionAge))
	}
}

// Hear takes over what came from the load balancer. Without an instance nothing
// synced was heard yet, and there is nothing to take over.
func (g *Gate) Hear(now time.Time, h Heard) {
	if h.Instance == "" {
		return
	}
	ownWord := h.Instance == g.instance && g.freshness(now) == Live
	g.instance, g.revision, g.everSynced, g.grace = h.Instance, h.Revision, true, h.Grace
	g.goingAway = time.Time{}
	if h.GoingAway {
		g.goingAway = h.DrainEnd
	}
	if h.Live {
		g.tracking = true
		g.lbLease.renew(h.LeaseEnd)
	} else {
		g.tracking = false
		g.graceStart = earlier(h.LeaseEnd, h.EndedAt)
	}
	if h.Complete {
		spoken := make(vip.Set, len(h.Words))
		for _, w := range h.Words {
			spoken[w.VIP] = struct{}{}
		}
		for v, e := range g.vips {
			if !spoken.Has(v) {
				g.say(now, e, Word{VIP: v, Said: SaidNotReady}, ownWord)
			}
		}
	}
	for _, w := range h.Words {
		g.say(now, g.entry(w.VIP), w, ownWord)
	}
	for _, v := range h.Removed {
		g.say(now, g.entry(v), Word{VIP: v, Said: SaidNotReady}, ownWord)
	}
}

// Stop begins the drain of the whole frontend. It cannot be taken back.
func (g *Gate) Stop(now time.Time) {
	if g.stopEnd.IsZero() {
		g.stopEnd = now.Add(g.options.DrainTime)
	}
}

// SkipDrains ends every drain that runs, so that the next Evaluate withdraws.
func (g *Gate) SkipDrains(now time.Time) {
	if !g.stopEnd.IsZero() {
		g.stopEnd = now
	}
}

// Drain begins an operator's drain of VIPs; those that are not configured, or
// drained already, are left alone.
func (g *Gate) Drain(now time.Time, vips ...vip.VIP) {
	for _, v := range vips {
		if e, ok := g.vips[v]; ok && e.configured && e.drained.IsZero() {
			e.drained = now.Add(g.options.DrainTime)
			g.wake(e.drained, v)
			g.touch(v)
		}
	}
}

// Undrain takes operators' drains back.
func (g *Gate) Undrain(vips ...vip.VIP) {
	for _, v := range vips {
		if e, ok := g.vips[v]; ok && !e.drained.IsZero() {
			e.drained = time.Time{}
			g.touch(v)
		}
	}
}

// Evaluate decides at now and returns every VIP whose decision changed. The
// slice is valid until the next call.
func (g *Gate) Evaluate(now time.Time) []Change {
	g.changes = g.changes[:0]
	current := g.globals(now)
	for len(g.timers) > 0 && !now.Before(g.timers[0].at) {
		g.touch(heap.Pop(&g.timers).(timer).vip)
	}
	if current != g.seen {
		g.seen = current
		for _, e := range g.vips {
			g.decide(now, e)
		}
		g.clean()
		return g.changes
	}
	for v := range g.dirty {
		if e, ok := g.vips[v]; ok {
			g.decide(now, e)
		}
	}
	g.clean()
	return g.changes
}

// clean forgets what was dirty. A map that held many is given up: walking and
// clearing it would cost what it once held, and the next flip must not pay for
// an earlier flood.
func (g *Gate) clean() {
	if len(g.dirty) > 64 {
		g.dirty = map[vip.VIP]struct{}{}
		return
	}
	clear(g.dirty)
}

// Deadline tells when Evaluate can give something new though no input came;
// zero if never.
func (g *Gate) Deadline(now time.Time) time.Time {
	var next time.Time
	soonest := func(t time.Time) {
		if !t.IsZero() && t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	soonest(g.gatewayLease.deadline(now))
	soonest(g.stopEnd)
	soonest(g.goingAway)
	if g.everSynced {
		start := g.graceStart
		if g.tracking {
			start = g.lbLease.end
			soonest(g.lbLease.deadline(now))
		}
		soonest(start.Add(g.grace - lastGasp))
		soonest(start.Add(g.grace))
	}
	if len(g.timers) > 0 {
		soonest(g.timers[0].at)
		if !g.timers[0].at.After(now) {
			return now
		}
	}
	return next
}

// Freshness tells how much the load balancer's word is worth at now.
func (g *Gate) Freshness(now time.Time) Freshness { return g.freshness(now) }

// Position is the load balancer's position that the decisions rest on.
func (g *Gate) Position() (instance string, revision uint64) { return g.instance, g.revision }

// Decision returns the decision on v as of the last Evaluate.
func (g *Gate) Decision(v vip.VIP) Decision {
	if e, ok := g.vips[v]; ok {
		return e.decision
	}
	return Decision{}
}

// Drained returns the VIPs that an operator drained, with the ends of their drain
// times.
func (g *Gate) Drained() map[vip.VIP]time.Time {
	drained := map[vip.VIP]time.Time{}
	for v, e := range g.vips {
		if !e.drained.IsZero() {
			drained[v] = e.drained
		}
	}
	return drained
}

// say takes over one word. A flap counts only if a live load balancer took
// back its own word.
func (g *Gate) say(now time.Time, e *entry, w Word, countFlap bool) {
	if e.said == w.Said && e.drainEnd.Equal(w.DrainEnd) {
		return
	}
	switch {
	case e.said == SaidReady && w.Said == SaidNotReady && countFlap:
		e.flaps = e.flaps.fell(now)
	case e.said == SaidNotReady && w.Said == SaidReady && !g.options.NoFlapBackoff:
		e.riseAt = time.Time{}
		if wait := e.flaps.wait(now); wait > 0 {
			e.riseAt = now.Add(wait)
			g.wake(e.riseAt, e.vip)
		}
	}
	e.said, e.drainEnd = w.Said, w.DrainEnd
	if w.Said == SaidDraining {
		g.wake(e.drainEnd, e.vip)
	}
	g.touch(e.vip)
}

// entry returns the entry of v, made if missing. Once a synced snapshot was
// heard, a VIP nobody spoke of is not ready.
func (g *Gate) entry(v vip.VIP) *entry {
	e, ok := g.vips[v]
	if !ok {
		e = &entry{vip: v}
		if g.everSynced {
			e.said = SaidNotReady
		}
		g.vips[v] = e
	}
	return e
}

func (g *Gate) touch(v vip.VIP) { g.dirty[v] = struct{}{} }

func (g *Gate) wake(at time.Time, v vip.VIP) { heap.Push(&g.timers, timer{at, v}) }

// decide brings the decision on e up to date. An entry that nobody needs any
// more is forgotten, so that memory follows what is configured and heard of.
func (g *Gate) decide(now time.Time, e *entry) {
	to := g.table(now, e)
	if to != e.decision {
		g.changes = append(g.changes, Change{VIP: e.vip, From: e.decision, To: to})
		e.decision = to
	}
	if !e.configured && e.said <= SaidNotReady {
		delete(g.vips, e.vip)
	}
}

// earlier returns the earlier of two times, where zero stands for unknown.
func earlier(a, b time.Time) time.Time {
	if b.IsZero() || (!a.IsZero() && a.Before(b)) {
		return a
	}
	return b
}
