package bird

import (
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// raiseTime is how long a released BFD session may take to come up; until then its gateway
	// counts as usable. The first packet takes up to a second, the interval while a session is down
	// (RFC 5880 section 6.8.3).
	raiseTime = 3 * time.Second
	// Bounds of the time between two releases of a gateway that does not come up.
	minRelease, maxRelease = 5 * time.Second, 10 * time.Minute
)

// evidence records the behavior of a static gateway's BFD session while the session was released.
// A session that is held down is never up, so the usability of its gateway follows from the past:
// a gateway whose session was down when it was held down, or did not come up after a release, is
// dead until the session comes up.
//
// The load balancer of Meridio 1.x is available only while a gateway is usable. With only dead
// gateways no family attracts traffic, so no gateway would be released again. Therefore a dead
// gateway becomes usable for one more release when its packets arrive again, and in any case
// after maxRelease: it may wait for packets of the frontend (RFC 5880 section 6.1, passive role).
type evidence struct {
	gateway  trench.Gateway // configuration to which the evidence applies
	external string         // interface of the gateway

	fresh   bool            // not held down since the gateway was configured or up
	failed  time.Time       // when the gateway became dead; zero if it is not dead
	silent  bool            // since failed, no packet of the gateway arrived for a detection time
	delay   backoff.Backoff // delay of the next release
	release time.Time       // earliest time of the next release
}

// about returns the evidence if it applies to the configuration, or else new evidence.
func (e evidence) about(gateway trench.Gateway, external string) evidence {
	if e.external != external || !sameGateway(e.gateway, gateway) {
		return evidence{gateway: gateway, external: external, fresh: true}
	}
	return e
}

func sameGateway(a, b trench.Gateway) bool {
	if (a.BFD == nil) != (b.BFD == nil) || a.BFD != nil && *a.BFD != *b.BFD {
		return false
	}
	a.BFD, b.BFD = nil, nil
	return a == b
}

// released adds an observation of a session that was released at since.
func (e *evidence) released(at time.Time, state string, since time.Time) {
	switch {
	case state == bfdUp:
		*e = evidence{}.about(e.gateway, e.external)
	case !e.failed.IsZero(), e.usable(at, since):
	default:
		// The back-off applies after a failed release. A session that was never held down has had none.
		e.failed, e.release, e.silent = at, at, e.fresh
		if !e.fresh {
			e.delay.Min, e.delay.Max = minRelease, maxRelease
			e.release = at.Add(e.delay.Next())
		}
	}
}

// held adds an observation of a session that is held down.
func (evidence *evidence) held(at time.Time, state string) {
	if evidence.fresh = false; evidence.failed.IsZero() {
		return
	}
	evidence.silent = evidence.silent || state != bfdInit // BIRD shows Init while packets of the gateway arrive
	heard := evidence.silent && state == bfdInit && !at.Before(evidence.release)
	if heard || at.Sub(evidence.failed) >= maxRelease {
		evidence.failed = time.Time{}
	}
}

// usable reports whether a session that is not up and was released at since may still come up.
func (evidence *evidence) usable(at, since time.Time) bool {
	return evidence.failed.IsZero() && at.Sub(since) < raiseTime
}
