package gate

import "time"

// table is the decision table of the design (section 5), row by row: the first
// row that holds wins. Everything that concerns all VIPs is taken from g.seen,
// so that one Evaluate judges all of them by the same look.
func (g *Gate) table(now time.Time, e *entry) Decision {
	current := e.decision.Advertisement
	gated := !g.options.Ungated
	switch {
	case !e.configured: // row 1
		return Decision{Withdrawn, NotConfigured}
	case gated && e.said == SaidNever: // row 2
		return Decision{Withdrawn, LBNeverSeen}
	case gated && e.said == SaidNotReady: // row 2
		return Decision{Withdrawn, LBNotReady}
	case !e.routed: // row 3
		return Decision{Withdrawn, NoSourceRouting}
	case !g.seen.up[e.vip.Family()]: // row 4
		return Decision{Withdrawn, NoGateway}
	case gated && g.seen.freshness == Lost && g.options.OnLoss == WithdrawOnLoss: // row 5
		return Decision{Withdrawn, LBLost}
	}
	if phase, reason := g.drain(now, e); phase == drainOver { // row 7
		return Decision{Withdrawn, reason}
	} else if phase == draining { // row 6, never raises
		return Decision{min(current, Depreferred), reason}
	}
	switch {
	case gated && g.seen.freshness != Live: // row 8, never raises
		if g.seen.gasping {
			current = min(current, Depreferred)
		}
		return Decision{current, LBStale}
	case gated && now.Before(e.riseAt): // row 9
		return Decision{Withdrawn, Flapping}
	}
	return Decision{Announced, Ready} // row 10
}

// drain tells how far the furthest of all drains that concern e is, and why it
// is drained. When several run, the one that ends first decides.
func (g *Gate) drain(now time.Time, e *entry) (phase, Reason) {
	var end time.Time
	reason := Ready
	consider := func(t time.Time, r Reason) {
		if !t.IsZero() && (end.IsZero() || t.Before(end)) {
			end, reason = t, r
		}
	}
	consider(g.stopEnd, Stopping)
	consider(e.drained, Drained)
	if !g.options.Ungated {
		consider(g.goingAway, LBDraining)
		if e.said == SaidDraining {
			consider(e.drainEnd, LBDraining)
		}
	}
	return phaseOf(end, now), reason
}

// globals looks at everything that concerns all VIPs.
func (g *Gate) globals(now time.Time) globals {
	s := globals{
		freshness: g.freshness(now),
		stop:      phaseOf(g.stopEnd, now),
		away:      phaseOf(g.goingAway, now),
	}
	if s.freshness == Stale {
		end, doubt := g.graceEnd(now)
		s.gasping = !doubt && !now.Before(end.Add(-lastGasp))
	}
	if holds, doubt := g.gatewayLease.look(now); holds || doubt {
		s.up = g.gatewaysUp
	}
	return s
}

// freshness judges the load balancer's lease. A look that came late leaves the
// word STALE for a moment, so that nothing rises on a lease that has ended.
func (g *Gate) freshness(now time.Time) Freshness {
	if !g.everSynced {
		return Lost
	}
	if g.tracking {
		if holds, _ := g.lbLease.look(now); holds {
			return Live
		}
	}
	if end, doubt := g.graceEnd(now); doubt || now.Before(end) {
		return Stale
	}
	return Lost
}

// graceEnd is when a word that is not live is lost, and whether the look at the
// lease came late.
func (g *Gate) graceEnd(now time.Time) (end time.Time, doubt bool) {
	if !g.tracking {
		return g.graceStart.Add(g.grace), false
	}
	_, doubt = g.lbLease.look(now)
	return g.lbLease.end.Add(g.grace), doubt
}
