package serving

import (
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/targetset"
)

// maxRegistrySettles bounds the wait for more registrations, in [Options.RegistrySettle], from the
// first one: a rollout of the application registers new targets all the time.
const maxRegistrySettles = 5

// gathering is the wait before the first rise of a stream whose targets register themselves. They
// find a new load balancer one after the other, and the first would get the flows of all.
type gathering struct {
	over        bool
	known       bool            // no target is missing: the wait ends with the next evaluation
	seen        map[string]bool // names of targets
	first, last time.Time       // when the first and the last of them registered; zero: none did
}

// add notes which targets are new. One that the trench file lists ends the wait.
func (g *gathering) add(now time.Time, members []targetset.Member) {
	for i := 0; i < len(members) && !g.over; i++ {
		m := &members[i]
		if g.known = g.known || m.Origins.Has(targetset.OriginFile); g.seen[m.Name] {
			continue
		}
		if g.seen == nil {
			g.seen, g.first = map[string]bool{}, now
		}
		g.seen[m.Name], g.last = true, now
	}
}

// end returns when the wait ends unless more targets register; zero if it is over, or if no target
// has registered.
func (g *gathering) end(quiet time.Duration) time.Time {
	if g.over || g.first.IsZero() {
		return time.Time{}
	}
	return targetset.Soonest(g.last.Add(quiet), g.first.Add(maxRegistrySettles*quiet))
}

// waits reports whether the wait has begun, or is to end with the next evaluation.
func (g *gathering) waits() bool { return !g.over && (g.known || !g.first.IsZero()) }

// gather ends the waits that are due, and reports whether any was. It returns the next end.
func (e *Evaluator) gather(now time.Time) (next time.Time, ended bool) {
	e.gathering = slices.DeleteFunc(e.gathering, func(s *stream) bool {
		end := s.gathering.end(e.options.RegistrySettle)
		if !s.gathering.known && now.Before(end) {
			next = targetset.Soonest(next, end)
			return false
		}
		*s.gathering, s.gathers, ended = gathering{over: true}, false, true
		e.roster.touchStream(s)
		return true
	})
	return next, ended
}
