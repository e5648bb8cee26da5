package gate

import (
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// evaluateTable applies the decision table: the first matching row wins, and row 13 replaces the
// reason of an advertised VIP. Shared conditions come from gate.last, so that one Evaluate decides
// all VIPs on the same state.
func (gate *Gate) evaluateTable(now time.Time, entry *entry, current Advertisement, path path) Decision {
	var decision Decision
	decision.Advertisement, decision.Reason = gate.firstRow(now, entry, current, path)
	if decision.Advertisement != Withdrawn && !gate.exports(entry.vip) { // row 13
		decision.Reason = NotExported
	}
	return decision
}

func (gate *Gate) firstRow(now time.Time, entry *entry, current Advertisement, path path) (Advertisement, Reason) {
	gated := !gate.options.Ungated
	switch {
	case !entry.configured: // row 1
		return Withdrawn, NotConfigured
	case gated && !entry.reported: // row 2
		return Withdrawn, LBNeverSeen
	case gated && entry.state == vip.NotReady && !(entry.lastResort && entry.wasReady): // row 2
		return Withdrawn, LBNotReady
	case !entry.routed: // row 3
		return Withdrawn, NoSourceRouting
	case path == noGateway: // row 4
		return Withdrawn, NoGateway
	case path == notAccepted: // row 5
		return Withdrawn, NotAccepted
	case gated && gate.last.freshness == Lost && gate.options.OnLoss == WithdrawOnLoss: // row 6
		return Withdrawn, LBLost
	}
	if phase, reason := gate.drain(now, entry); phase == drainOver { // row 8
		return Withdrawn, reason
	} else if phase == draining { // row 7; never raises
		return min(current, Depreferred), reason
	}
	switch {
	case gated && gate.last.freshness != Live: // row 9; never raises
		if gate.last.finalGrace {
			current = min(current, Depreferred)
		}
		return current, LBStale
	case gated && entry.state == vip.NotReady: // row 10
		return Depreferred, LastResort
	case gated && now.Before(entry.riseAt): // row 11
		return Withdrawn, Flapping
	case gated && entry.suspected: // row 12
		return Depreferred, Suspected
	}
	return Announced, Ready // row 14
}

// exports reports whether the routing daemon exports v to a gateway, as far as known.
func (gate *Gate) exports(v vip.VIP) bool {
	exported := gate.gateways.Exported[v.Family()]
	return exported == nil || exported.Has(v)
}

// drain returns the phase and the reason of the drain of entry that ends first.
func (gate *Gate) drain(now time.Time, entry *entry) (phase, Reason) {
	var end time.Time
	reason := Ready
	consider := func(t time.Time, r Reason) {
		if !t.IsZero() && (end.IsZero() || t.Before(end)) {
			end, reason = t, r
		}
	}
	consider(gate.stopEnd, Stopping)
	consider(entry.leaveEnd, Drained)
	consider(entry.operatorDrainEnd, Drained)
	if !gate.options.Ungated {
		consider(gate.lbDrainEnd, LBDraining)
		if entry.state == vip.Draining {
			consider(entry.drainEnd, LBDraining)
		}
	}
	return phaseOf(end, now), reason
}

// observe returns the conditions that concern all VIPs.
func (gate *Gate) observe(now time.Time) conditions {
	s := conditions{
		freshness: gate.Freshness(now),
		stop:      phaseOf(gate.stopEnd, now),
		lbDrain:   phaseOf(gate.lbDrainEnd, now),
	}
	if s.freshness == Stale {
		end, late := gate.graceEnd(now)
		s.finalGrace = !late && !now.Before(end.Add(-finalGrace))
	}
	holds, late := gate.gatewayLease.check(now)
	for f := range s.paths {
		switch {
		case !holds && !late || !gate.gateways.Up[f]:
		case gate.gateways.Static[f] || gate.announcer.Accepted(now):
			s.paths[f] = usable
		default:
			s.paths[f] = notAccepted
		}
	}
	return s
}

// Freshness returns the freshness of the load balancer's state. A late check leaves it Stale, so
// that no VIP is raised on an expired lease.
func (gate *Gate) Freshness(now time.Time) Freshness {
	if !gate.synced {
		return Lost
	}
	if gate.streamOpen {
		if holds, _ := gate.lbLease.check(now); holds {
			return Live
		}
	}
	if end, late := gate.graceEnd(now); late || now.Before(end) {
		return Stale
	}
	return Lost
}

// graceEnd returns when a state that is not live is lost, and whether the lease check was late.
func (gate *Gate) graceEnd(now time.Time) (end time.Time, late bool) {
	if !gate.streamOpen {
		return gate.graceStart.Add(gate.grace), false
	}
	_, late = gate.lbLease.check(now)
	return gate.lbLease.end.Add(gate.grace), late
}
