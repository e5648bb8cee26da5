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
	// most quickChecks checks, as with 300 targets a second: a rest would save no wake-up.
	quickRounds = 4
	quickRest   = 2 * time.Millisecond
	quickChecks = 8
	// sourceWait is how long a target without a verdict waits for the source address of its checks:
	// duplicate address detection takes up to 2 s.
	sourceWait = 10 * time.Second
)

// Run checks until ctx ends, and waits for the checks that run. It is called once. It fails only
// when it cannot start, or when epoll fails.
func (checker *Checker) Run(ctx context.Context) (err error) {
	l := loop{Checker: checker}
	defer l.probes.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if checker.dial == nil {
		if l.connector, err = newConnector(); err != nil {
			return fmt.Errorf("failed to start health checks: %w", err)
		}
		defer func() {
			open, errStop := l.connector.stop()
			for _, p := range open {
				checker.finish(p, outcome{verdict: cancelled}, time.Now())
			}
			err = errors.Join(err, errStop)
		}()
	}
	if checker.FWMark != nil && checker.dial == nil {
		// Only failures through a VIP are diagnosed, and these checks need fwmarks.
		for range maxDiagnoses {
			l.probes.Go(func() { checker.diagnose(ctx) })
		}
	}
	close(checker.ready)
	defer checker.pulse.End()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		// While the loop rests, answers and due checks accumulate; only new targets end the rest.
		rest := l.round(ctx)
		var answers, rescheduled <-chan struct{}
		entered := checker.entered
		if rest <= 0 {
			// Without a rest any change of the schedule ends the wait, which covers new targets.
			entered, rescheduled = nil, checker.rescheduled
			rest = time.Until(l.next())
			if l.connector != nil {
				if answers, err = l.connector.answers(); err != nil {
					return fmt.Errorf("failed to wait for answers of targets: %w", err)
				}
			}
		}
		timer.Reset(rest)
		checker.pulse.Next(rest)
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

// round starts checks that are due and collects answers. New targets end the rest after it.
func (loop *loop) round(ctx context.Context) (rest time.Duration) {
	now := time.Now()
	if now.Sub(loop.began) >= pace {
		loop.began, loop.rounds, loop.started = now, 0, 0
	}
	handled := loop.collect(now)
	starting := loop.take(now)
	loop.started += len(loop.due)
	handled += len(loop.due)
	for _, probe := range loop.due {
		if probe.vip && !probe.source.IsValid() && loop.VIPSource != nil {
			probe.source = loop.VIPSource(vip.FamilyOf(probe.to))
		}
		outcome, ended := loop.checkSource(probe)
		if !ended && probe.vip {
			probe, outcome, ended = loop.route(probe)
		}
		if ended {
			loop.finish(probe, outcome, time.Now())
		} else if loop.connector == nil || !probe.plan.connects() {
			loop.probes.Go(func() { loop.finish(probe, probe.run(ctx, loop.dial), time.Now()) })
		} else if o, ended := loop.connector.start(probe); ended {
			loop.finish(probe, o, time.Now())
		}
	}
	if len(loop.due) > 0 {
		handled += loop.collect(time.Now()) // targets that are near have answered by now
	}
	switch {
	case loop.started >= burst:
		// No further check may start in this pace.
		return pace - time.Since(loop.began)
	case handled == 0:
		return 0
	}
	loop.rounds++
	if loop.rounds <= quickRounds && (starting || handled <= quickChecks) {
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
func (loop *loop) checkSource(probe probe) (o outcome, ended bool) {
	if loop.Source == nil || probe.ready {
		return outcome{}, false
	}
	problem, passing := loop.Source(probe.entry.Addr, probe.source)
	o = outcome{verdict: failed, silent: true, reason: problem}
	if passing && probe.patient {
		o = outcome{verdict: deferred, reason: "check not run: " + problem}
	}
	return o, problem != ""
}

// route adds the fwmark of a check to a VIP, or returns its outcome if no fwmark leads to the
// target. For a ready target the check is only postponed: the data plane reports the missing route.
func (loop *loop) route(probe probe) (_ probe, o outcome, ended bool) {
	problem := "check.via is vip, which needs a data plane"
	if loop.FWMark != nil {
		probe.fwmark, problem = loop.FWMark(probe.entry.Key)
	}
	switch {
	case problem == "":
		return probe, outcome{}, false
	case loop.FWMark != nil && (probe.ready || probe.patient):
		return probe, outcome{verdict: unrouted, reason: "check not run: " + problem}, true
	}
	return probe, outcome{verdict: failed, silent: true, reason: problem}, true
}

// collect applies the answers that arrived, and returns their number.
func (loop *loop) collect(now time.Time) int {
	if loop.connector == nil {
		return 0
	}
	return loop.connector.collect(now, func(p probe, o outcome) { loop.finish(p, o, now) })
}

// take moves checks that are due from the schedule to due, as many as may start in this pace, and
// reports whether some target has no verdict yet.
func (loop *loop) take(now time.Time) (starting bool) {
	loop.mu.Lock()
	defer loop.mu.Unlock()
	loop.due = loop.due[:0]
	room := min(burst-loop.started, loop.maxConcurrent-loop.running)
	for len(loop.due) < room && len(loop.schedule) > 0 && !loop.schedule[0].due.After(now) {
		e := heap.Pop(&loop.schedule).(*entry)
		loop.running++
		loop.due = append(loop.due, probe{
			path: e.path(loop.edits[e.Stream]), entry: e, began: now, plan: e.plan, routings: loop.routings,
			ready: e.State == Ready, patient: e.State == Starting && now.Sub(e.Since) < sourceWait,
		})
	}
	return loop.unjudged > 0
}

// next returns when the next round is due unless a channel wakes the loop before.
func (loop *loop) next() time.Time {
	loop.mu.Lock()
	defer loop.mu.Unlock()
	select {
	case <-loop.rescheduled: // a token from before this read of the schedule; later changes refill it
	default:
	}
	at := time.Now().Add(time.Minute)
	if len(loop.schedule) > 0 && loop.running < loop.maxConcurrent { // else the check that ends wakes the loop
		at = loop.schedule[0].due
	}
	if loop.connector != nil && len(loop.connector.busy) > 0 && loop.connector.busy[0].due.Before(at) {
		at = loop.connector.busy[0].due
	}
	return at
}
