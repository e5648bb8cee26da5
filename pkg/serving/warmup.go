package serving

import (
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
)

// warmupPace is the least time between counts of warming targets, which registrations share.
const warmupPace = time.Second

// warmups are the slow starts of targets.
type warmups struct {
	// begun holds when the warmup of each warming address began.
	begun map[healthcheck.Key]time.Time
	next  time.Time // of the next count; zero if no address warms up
}

// observe begins or ends the warmup of an address before its new health is stored. A target that
// was overdue is as warm as before: the load balancer was late.
func (evaluator *Evaluator) observe(now time.Time, health healthcheck.Health) {
	warmups, stream := &evaluator.warmups, evaluator.streams[health.Stream]
	was, known := evaluator.health[health.Key]
	if stream != nil {
		stream.opened = stream.opened || stream.ready() && stream.settleEnd.IsZero()
	}
	switch {
	case health.State == healthcheck.Starting || health.State == healthcheck.NotReady:
		delete(warmups.begun, health.Key)
	// At the start of the load balancer targets may be warm.
	case stream == nil || !stream.opened || stream.Check.Warmup == 0:
	case health.State == healthcheck.Ready &&
		(!known || was.State == healthcheck.Starting || was.State == healthcheck.NotReady):
		warmups.begun[health.Key] = now
		warmups.next = targetset.Soonest(warmups.next, now.Add(warmupPace))
	}
}

// cold returns by how many tenths of a target an address counts less.
func (evaluator *Evaluator) cold(now time.Time, stream *stream, key healthcheck.Key) uint32 {
	begun, warming := evaluator.warmups.begun[key]
	age := now.Sub(begun)
	if !warming || age >= stream.Check.Warmup {
		return 0
	}
	return 10 - max(1, uint32(10*age/stream.Check.Warmup))
}

// warm schedules the streams of warming targets for counting once it is due.
func (evaluator *Evaluator) warm(now time.Time) {
	warmups := &evaluator.warmups
	if warmups.next.IsZero() || now.Before(warmups.next) {
		return
	}
	warmups.next = time.Time{}
	for key, begun := range warmups.begun {
		evaluator.mark(key)
		if stream := evaluator.streams[key.Stream]; stream == nil || now.Sub(begun) >= stream.Check.Warmup {
			delete(warmups.begun, key)
			continue
		}
		warmups.next = now.Add(warmupPace)
	}
}
