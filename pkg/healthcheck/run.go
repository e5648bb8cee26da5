package healthcheck

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// pace is the longest time for which the loop collects work. Waking up costs as much as several
	// checks: 10 000 checks a second need 100 wake-ups, not 10 000.
	pace = 10 * time.Millisecond
	// burst is the maximum number of checks that start in one pace. It matters after a stall, when
	// all targets are due together; 160 in 10 ms exceed the needs of 10 000 targets at 1 s.
	burst = 160
	// restPer is how long the loop rests, up to a pace, for each check that it handled. Few checks
	// are hardly delayed, and many are handled together.
	restPer = time.Millisecond
	// While a target waits for its first verdict, the first quickRounds rounds of a pace have no rest,
	// and later rounds have at most quickRest. These quickRounds also have no rest if they handled at
	// most quickChecks checks, as with 300 targets a second: a rest would delay answers and save no
	// wake-up.
	quickRounds = 4
	quickRest   = 2 * time.Millisecond
	quickChecks = 8
	// sourceWait is how long a target without a verdict waits for the source address of its checks:
	// duplicate address detection takes up to 2 s.
	sourceWait = 10 * time.Second
)

// Run checks until ctx ends, and waits for the checks that run. It is called once. It fails only
// when it cannot start, or when epoll fails.
func (c *Checker) Run(ctx context.Context) (err error) {
	l := loop{Checker: c}
	defer l.probes.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if c.dial == nil {
		if l.connector, err = newConnector(); err != nil {
			return fmt.Errorf("failed to start health checks: %w", err)
		}
		defer func() {
			open, errStop := l.connector.stop()
			for _, p := range open {
				c.finish(p, outcome{verdict: cancelled}, time.Now())
			}
			err = errors.Join(err, errStop)
		}()
	}
	if c.FWMark != nil && c.dial == nil {
		for range maxDiagnoses {
			l.probes.Go(func() { c.diagnose(ctx) })
		}
	}
	close(c.ready)
	defer c.pulse.End()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		// While the loop rests, answers and due checks accumulate; only new targets end the rest.
		rest := l.round(ctx)
		var answers, rescheduled <-chan struct{}
		entered := c.entered
		if rest <= 0 {
			entered, rescheduled = nil, c.rescheduled
			rest = time.Until(l.next())
			if l.connector != nil {
				if answers, err = l.connector.answers(); err != nil {
					return fmt.Errorf("failed to wait for answers of targets: %w", err)
				}
			}
		}
		timer.Reset(rest)
		c.pulse.Next(rest)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-entered:
		case <-rescheduled:
		case <-answers:
		case <-timer.C:
		}
	}
}

// loop is a running checker. It belongs to one goroutine.
type loop struct {
	*Checker
	connector *connector     // nil with a dialer of a test
	probes    sync.WaitGroup // the checks that have a goroutine
	due       []probe        // of one round
	// began is the start of the current pace, rounds counts its rounds that handled checks or
	// answers, and started counts the checks started in it.
	began           time.Time
	rounds, started int
}

// round starts checks that are due and collects answers. A rest above 0 delays the next round,
// unless new targets arrive.
func (l *loop) round(ctx context.Context) (rest time.Duration) {
	now := time.Now()
	if now.Sub(l.began) >= pace {
		l.began, l.rounds, l.started = now, 0, 0
	}
	handled := l.collect(now)
	starting := l.take(now)
	l.started += len(l.due)
	handled += len(l.due)
	for _, p := range l.due {
		if p.vip && !p.source.IsValid() && l.VIPSource != nil {
			p.source = l.VIPSource(vip.FamilyOf(p.to))
		}
		o, ended := l.checkSource(p)
		if !ended && p.vip {
			p, o, ended = l.route(p)
		}
		if ended {
			l.finish(p, o, time.Now())
		} else if l.connector == nil || p.plan.exchange != nil {
			l.probes.Go(func() { l.finish(p, p.run(ctx, l.dial), time.Now()) })
		} else if o, ended := l.connector.start(p); ended {
			l.finish(p, o, time.Now())
		}
	}
	if len(l.due) > 0 {
		handled += l.collect(time.Now()) // targets that are near have answered by now
	}
	switch {
	case l.started >= burst:
		// No further check may start in this pace.
		return pace - time.Since(l.began)
	case handled == 0:
		return 0
	}
	l.rounds++
	if l.rounds <= quickRounds && (starting || handled <= quickChecks) {
		return 0
	}
	longest := pace
	if starting {
		longest = quickRest
	}
	return min(time.Duration(handled)*restPer, longest) - time.Since(now)
}

// checkSource returns the outcome of a check that has no source address. Without it the kernel
// would choose another address, even ::1, and the check would time out, or succeed from a
// link-local address to which no traffic returns.
func (l *loop) checkSource(p probe) (o outcome, ended bool) {
	if l.Source == nil || p.ready {
		return outcome{}, false
	}
	problem, passing := l.Source(p.entry.Addr, p.source)
	o = outcome{verdict: failed, silent: true, reason: problem}
	if passing && p.patient {
		o = outcome{verdict: deferred, reason: "check not run: " + problem}
	}
	return o, problem != ""
}

// route adds the fwmark of a check to a VIP, or returns its outcome if no fwmark leads to the
// target. For a ready target the check is only postponed: the data plane reports the missing route.
func (l *loop) route(p probe) (_ probe, o outcome, ended bool) {
	problem := "check.via is vip, which needs a data plane"
	if l.FWMark != nil {
		p.fwmark, problem = l.FWMark(p.entry.Key)
	}
	switch {
	case problem == "":
		return p, outcome{}, false
	case l.FWMark != nil && (p.ready || p.patient):
		return p, outcome{verdict: unrouted, reason: "check not run: " + problem}, true
	}
	return p, outcome{verdict: failed, silent: true, reason: problem}, true
}

// collect applies the answers that arrived, and returns their number.
func (l *loop) collect(now time.Time) int {
	if l.connector == nil {
		return 0
	}
	return l.connector.collect(now, func(p probe, o outcome) { l.finish(p, o, now) })
}

// take moves checks that are due from the schedule to l.due, as many as may start in this pace, and
// reports whether some target has no verdict yet.
func (l *loop) take(now time.Time) (starting bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = l.due[:0]
	room := min(burst-l.started, l.maxConcurrent-l.running)
	for len(l.due) < room && len(l.schedule) > 0 && !l.schedule[0].due.After(now) {
		e := heap.Pop(&l.schedule).(*entry)
		l.running++
		l.due = append(l.due, probe{
			path: e.path(), entry: e, began: now, plan: e.plan, routings: l.routings,
			ready: e.State == Ready, patient: e.State == Starting && now.Sub(e.Since) < sourceWait,
		})
	}
	return l.unjudged > 0
}

// next returns when the next round is due unless a channel wakes the loop before.
func (l *loop) next() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.rescheduled: // a token from before this read of the schedule; later changes refill it
	default:
	}
	at := time.Now().Add(time.Minute)
	if len(l.schedule) > 0 && l.running < l.maxConcurrent { // else the check that ends wakes the loop
		at = l.schedule[0].due
	}
	if l.connector != nil && len(l.connector.busy) > 0 && l.connector.busy[0].due.Before(at) {
		at = l.connector.busy[0].due
	}
	return at
}
