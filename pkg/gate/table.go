package gate

import (
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// evaluateTable applies the decision table: the first matching row wins, and row 11 replaces the
// reason of an advertised VIP. Shared conditions come from g.last, so that one Evaluate decides
// all VIPs on the same state.
func (g *Gate) evaluateTable(now time.Time, e *entry, current Advertisement, path path) Decision {
	d := g.firstRow(now, e, current, path)
	if d.Advertisement != Withdrawn && !g.exports(e.vip) { // row 11
		d.Reason = NotExported
	}
	return d
}

func (g *Gate) firstRow(now time.Time, e *entry, current Advertisement, path path) Decision {
	gated := !g.options.Ungated
	switch {
	case !e.configured: // row 1
		return Decision{Withdrawn, NotConfigured}
	case gated && !e.reported: // row 2
		return Decision{Withdrawn, LBNeverSeen}
	case gated && e.state == vip.NotReady: // row 2
		return Decision{Withdrawn, LBNotReady}
	case !e.routed: // row 3
		return Decision{Withdrawn, NoSourceRouting}
	case path == noGateway: // row 4
		return Decision{Withdrawn, NoGateway}
	case path == notAccepted: // row 5
		return Decision{Withdrawn, NotAccepted}
	case gated && g.last.freshness == Lost && g.options.OnLoss == WithdrawOnLoss: // row 6
		return Decision{Withdrawn, LBLost}
	}
	if phase, reason := g.drain(now, e); phase == drainOver { // row 8
		return Decision{Withdrawn, reason}
	} else if phase == draining { // row 7; never raises
		return Decision{min(current, Depreferred), reason}
	}
	switch {
	case gated && g.last.freshness != Live: // row 9; never raises
		if g.last.finalGrace {
			current = min(current, Depreferred)
		}
		return Decision{current, LBStale}
	case gated && now.Before(e.riseAt): // row 10
		return Decision{Withdrawn, Flapping}
	}
	return Decision{Announced, Ready} // row 12
}

// exports reports whether the routing daemon exports v to a gateway, as far as known.
func (g *Gate) exports(v vip.VIP) bool {
	exported := g.gateways.Exported[v.Family()]
	return exported == nil || exported.Has(v)
}

// drain returns the phase and the reason of the drain of e that ends first.
func (g *Gate) drain(now time.Time, e *entry) (phase, Reason) {
	var end time.Time
	reason := Ready
	consider := func(t time.Time, r Reason) {
		if !t.IsZero() && (end.IsZero() || t.Before(end)) {
			end, reason = t, r
		}
	}
	consider(g.stopEnd, Stopping)
	consider(e.operatorDrainEnd, Drained)
	if !g.options.Ungated {
		consider(g.lbDrainEnd, LBDraining)
		if e.state == vip.Draining {
			consider(e.drainEnd, LBDraining)
		}
	}
	return phaseOf(end, now), reason
}

// observe returns the conditions that concern all VIPs.
func (g *Gate) observe(now time.Time) conditions {
	s := conditions{
		freshness: g.Freshness(now),
		stop:      phaseOf(g.stopEnd, now),
		lbDrain:   phaseOf(g.lbDrainEnd, now),
	}
	if s.freshness == Stale {
		end, late := g.graceEnd(now)
		s.finalGrace = !late && !now.Before(end.Add(-finalGrace))
	}
	holds, late := g.gatewayLease.check(now)
	for f := range s.paths {
		switch {
		case !holds && !late || !g.gateways.Up[f]:
		case g.gateways.Static[f] || g.announcer.Accepted(now):
			s.paths[f] = usable
		default:
			s.paths[f] = notAccepted
		}
	}
	return s
}

// Freshness returns the freshness of the load balancer's state. A late check leaves it Stale, so
// that no VIP is raised on an expired lease.
func (g *Gate) Freshness(now time.Time) Freshness {
	if !g.synced {
		return Lost
	}
	if g.streamOpen {
		if holds, _ := g.lbLease.check(now); holds {
			return Live
		}
	}
	if end, late := g.graceEnd(now); late || now.Before(end) {
		return Stale
	}
	return Lost
}

// graceEnd returns when a state that is not live is lost, and whether the lease check was late.
func (g *Gate) graceEnd(now time.Time) (end time.Time, late bool) {
	if !g.streamOpen {
		return g.graceStart.Add(g.grace), false
	}
	_, late = g.lbLease.check(now)
	return g.lbLease.end.Add(g.grace), late
}
