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
func (wait *gathering) add(now time.Time, members []targetset.Member) {
	for i := 0; i < len(members) && !wait.over; i++ {
		member := &members[i]
		if wait.known = wait.known || member.Origins.Has(targetset.OriginFile); wait.seen[member.Name] {
			continue
		}
		if wait.seen == nil {
			wait.seen, wait.first = map[string]bool{}, now
		}
		wait.seen[member.Name], wait.last = true, now
	}
}

// end returns when the wait ends unless more targets register; zero if it is over or has not begun.
func (wait *gathering) end(quiet time.Duration) time.Time {
	if wait.over || wait.first.IsZero() {
		return time.Time{}
	}
	return targetset.Soonest(wait.last.Add(quiet), wait.first.Add(maxRegistrySettles*quiet))
}

// waits reports whether the wait has begun, or is to end with the next evaluation.
func (wait *gathering) waits() bool { return !wait.over && (wait.known || !wait.first.IsZero()) }

// gather ends the waits that are due, and reports whether any was. It returns the next end.
func (evaluator *Evaluator) gather(now time.Time) (next time.Time, ended bool) {
	evaluator.gathering = slices.DeleteFunc(evaluator.gathering, func(stream *stream) bool {
		end := stream.gathering.end(evaluator.options.RegistrySettle)
		if !stream.gathering.known && now.Before(end) {
			next = targetset.Soonest(next, end)
			return false
		}
		*stream.gathering, stream.gathers, ended = gathering{over: true}, false, true
		evaluator.roster.touchStream(stream)
		return true
	})
	return next, ended
}
