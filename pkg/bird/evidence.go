package bird

import (
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/trench"
)

const (
	// raiseTime is how long a BFD session may take to come up, and counts as usable meanwhile: it takes
	// up to a second, the interval of packets while a session is down (RFC 5880 section 6.8.3).
	raiseTime = 3 * time.Second
	// Bounds of the time between the releases of a gateway that does not come up.
	minRelease, maxRelease = 5 * time.Second, 10 * time.Minute
)

// evidence is what the BFD session of a static gateway has shown while it was released. A session
// that is held down is never up, so whether its gateway can be used depends on the past: one that
// was down when it was held down, or did not come up after a release, is dead until its session was
// up. The load balancer of Meridio 1.x is available only while a gateway is usable, hence does not
// attract, and so does not release a dead gateway again. Therefore a dead gateway is usable for one
// more release when its packets arrive again, and after maxRelease in any case: it may wait for
// packets of the frontend (RFC 5880 section 6.1, passive role).
type evidence struct {
	gateway  trench.Gateway // the configuration that the rest is about
	external string         // its interface

	fresh   bool            // not held down since it was configured or up
	failed  time.Time       // since when the gateway is dead; zero: it is not
	silent  bool            // since failed, no packet of the gateway arrived for a detection time
	delay   backoff.Backoff // before the next release
	release time.Time       // not released before
}

// about returns the evidence about a configuration. That about another one is forgotten.
func (e evidence) about(g trench.Gateway, external string) evidence {
	if e.external != external || !sameGateway(e.gateway, g) {
		return evidence{gateway: g, external: external, fresh: true}
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

// released adds a look at a session that is not held down since a time.
func (e *evidence) released(at time.Time, state string, since time.Time) {
	switch {
	case state == bfdUp:
		*e = evidence{}.about(e.gateway, e.external)
	case !e.failed.IsZero(), e.usable(at, since):
	default:
		// A session that was not held down says nothing about a release: the next one need not wait.
		e.failed, e.release, e.silent = at, at, e.fresh
		if !e.fresh {
			e.delay.Min, e.delay.Max = minRelease, maxRelease
			e.release = at.Add(e.delay.Next())
		}
	}
}

// held adds a look at a session that is held down.
func (e *evidence) held(at time.Time, state string) {
	if e.fresh = false; e.failed.IsZero() {
		return
	}
	e.silent = e.silent || state != bfdInit // BIRD's state while packets of the gateway arrive
	heard := e.silent && state == bfdInit && !at.Before(e.release)
	if heard || at.Sub(e.failed) >= maxRelease {
		e.failed = time.Time{}
	}
}

// usable reports whether a session that is not up, and released since a time, may come up.
func (e *evidence) usable(at, since time.Time) bool {
	return e.failed.IsZero() && at.Sub(since) < raiseTime
}
