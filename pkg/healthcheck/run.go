package healthcheck

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// pace is the longest time for which the loop collects what there is to do.
	// Waking up costs as much as several checks: 10 000 checks a second need 100
	// of it, not 10 000.
	pace = 10 * time.Millisecond
	// burst checks at most are started in one pace. After a stall all targets are
	// due at once; 160 in 10 ms are more than 10 000 targets at 1 s need.
	burst = 160
	// restPer is how long the loop rests, up to a pace, for each check that it
	// handled. Few checks are hardly delayed, and many are done together.
	restPer = time.Millisecond
	// While a target waits for its first verdict, quickRounds in a pace are not
	// followed by a rest at all, and the others by a short one.
	quickRounds = 4
	quickRest   = 2 * time.Millisecond
)

// Run checks until ctx ends, and waits for the checks that run. It is called once.
// It fails only when it cannot begin.
func (c *Checker) Run(ctx context.Context) (err error) {
	l := loop{Checker: c}
	defer l.probes.Wait()
	if c.dialer == nil {
		if l.connector, err = newConnector(); err != nil {
			return fmt.Errorf("begin to check targets: %w", err)
		}
		defer func() {
			open, errStop := l.connector.stop()
			for _, p := range open {
				c.finish(p, outcome{verdict: cancelled}, time.Now())
			}
			err = errors.Join(err, errStop)
		}()
	}
	close(c.ready)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if rest := l.round(ctx); rest > 0 {
			timer.Reset(rest)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-c.entered:
			case <-timer.C:
			}
			continue
		}
		var answers <-chan struct{}
		if l.connector != nil {
			if answers, err = l.connector.answers(); err != nil {
				return fmt.Errorf("wait for the answers of targets: %w", err)
			}
		}
		timer.Reset(time.Until(l.next()))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.rescheduled:
		case <-answers:
		case <-timer.C:
		}
	}
}

// loop is what a running checker has. It belongs to one goroutine.
type loop struct {
	*Checker
	connector *connector     // nil with a Dialer
	probes    sync.WaitGroup // of the checks that have a goroutine
	due       []probe        // of one round
	// When the running pace began, how many of its rounds handled anything, and how
	// many checks were started in it.
	began           time.Time
	rounds, started int
}

// round starts what is due and takes what was answered. If the next round is to
// wait, unless targets are new, it returns how long.
func (l *loop) round(ctx context.Context) (rest time.Duration) {
	now := time.Now()
	if now.Sub(l.began) >= pace {
		l.began, l.rounds, l.started = now, 0, 0
	}
	handled := l.collect(now)
	l.due = l.take(l.due[:0], now, burst-l.started)
	l.started += len(l.due)
	handled += len(l.due)
	for _, p := range l.due {
		if o, ended := l.withoutSource(p); ended {
			l.finish(p, o, time.Now())
		} else if l.connector == nil || p.plan.prober != nil {
			l.probes.Go(func() { l.finish(p, p.run(ctx, l.dialer), time.Now()) })
		} else if o, ended := l.connector.start(p); ended {
			l.finish(p, o, time.Now())
		}
	}
	if len(l.due) > 0 {
		handled += l.collect(time.Now()) // targets that are near have answered by now
	}
	switch {
	case l.started >= burst:
		return pace - time.Since(l.began)
	case handled == 0:
		return 0
	}
	l.rounds++
	longest := pace
	if l.hurrying() {
		if l.rounds <= quickRounds {
			return 0
		}
		longest = quickRest
	}
	return min(time.Duration(handled)*restPer, longest) - time.Since(now)
}

// withoutSource is the outcome of a check that has no source address. Without this
// look the kernel would choose another address, even ::1, and the check would time
// out, or succeed from a link-local address to which no traffic returns.
func (l *loop) withoutSource(p probe) (o outcome, ended bool) {
	if l.sources == nil || p.ready {
		return outcome{}, false
	}
	problem, passing := l.sources.Source(p.entry.Addr, p.plan.source(vip.FamilyOf(p.entry.Addr)))
	switch {
	case problem == "":
		return outcome{}, false
	case passing && p.patient:
		return outcome{verdict: deferred, reason: "check not run: " + problem}, true
	}
	return outcome{failed, true, problem}, true
}

// collect takes what was answered, and tells how many did.
func (l *loop) collect(now time.Time) int {
	if l.connector == nil {
		return 0
	}
	return l.connector.collect(now, func(p probe, o outcome) { l.finish(p, o, now) })
}

// next says when to look again unless something happens before.
func (l *loop) next() time.Time {
	at := l.nextDue(time.Now())
	if l.connector != nil {
		if deadline, any := l.connector.deadline(); any && deadline.Before(at) {
			return deadline
		}
	}
	return at
}

// hurrying reports whether some target waits for its first verdict.
func (c *Checker) hurrying() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hurried > 0
}

// take takes up to room checks that are due from the schedule.
func (c *Checker) take(due []probe, now time.Time, room int) []probe {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.schedule) > 0 && c.running < c.maxConcurrent && len(due) < room && !c.schedule[0].due.After(now) {
		e := heap.Pop(&c.schedule).(*entry)
		c.running++
		due = append(due, probe{
			entry: e, began: now, plan: e.plan,
			ready: e.State == Ready, patient: e.State == Starting && now.Sub(e.Since) < sourceWait,
		})
	}
	return due
}

// nextDue is when the next check is to start; a change of that from now on
// fills rescheduled.
func (c *Checker) nextDue(now time.Time) time.Time {
	const idle = time.Minute
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.rescheduled:
	default:
	}
	if len(c.schedule) == 0 || c.running >= c.maxConcurrent {
		return now.Add(idle) // the check that ends wakes the loop
	}
	return c.schedule[0].due
}

// slots is how many slots an interval has, and maxSlot the longest of them.
const (
	slots   = 50
	maxSlot = 20 * time.Millisecond
)

// gather moves a steady check to the beginning of its slot, never later, so that
// checks which fall close together share one wake-up: with some hundred targets it
// is the waking that costs.
func (c *Checker) gather(e *entry, due, now time.Time) time.Time {
	slot := min(maxSlot, e.interval()/slots)
	if e.State == Starting || slot <= 0 {
		return due
	}
	if at := c.epoch.Add(due.Sub(c.epoch).Truncate(slot)); at.After(now) {
		return at
	}
	return due
}

// finish takes the outcome of a check into account and schedules the next.
func (c *Checker) finish(p probe, o outcome, now time.Time) {
	c.mu.Lock()
	if c.running == c.maxConcurrent {
		latest.Wake(c.rescheduled)
	}
	c.running--
	e := p.entry
	if e.gone || o.verdict == cancelled {
		c.mu.Unlock()
		return
	}
	before := e.effective()
	complain := o.verdict == unmade && (c.complained.IsZero() || now.Sub(c.complained) >= complainEvery)
	if complain {
		c.complained = now
	}
	e.LastError = o.reason
	first := !e.judged
	wasSilent := e.Silent
	switch o.verdict {
	case unmade:
	case deferred:
		e.alive = now
		c.expect(e)
	default:
		e.Silent = o.silent
		e.count(o.verdict == succeeded)
		e.LastCheck, e.alive, e.overdue = now, now, false
		c.expect(e)
		if e.State != Starting {
			c.judged(e)
		}
	}
	c.hurry(e)
	health := e.health()
	switch {
	case health.State != before:
		e.Since, health.Since = now, now
		c.touch(e)
		latest.Wake(c.changed)
	case health.State == NotReady && health.Silent != wasSilent:
		// Outage detection learns that something answers again.
		c.touch(e)
		latest.Wake(c.changed)
	}
	e.due = c.gather(e, e.next(p.began, now, first), now)
	if o.verdict == deferred {
		e.due = now.Add(min(failedRecheck, e.interval()))
	}
	heap.Push(&c.schedule, e)
	if e.index == 0 {
		latest.Wake(c.rescheduled)
	}
	c.mu.Unlock()

	if complain {
		c.log.Error("checks cannot run, the targets become overdue if this lasts", "error", o.reason)
	}
	if health.State != before {
		level := slog.LevelInfo
		if before == Starting && health.State == Ready {
			level = slog.LevelDebug // the usual, for thousands at each start
		}
		c.log.Log(context.Background(), level, "target changed", "stream", e.Stream, "target", e.Name, "address", e.Addr,
			"from", before.String(), "to", health.State.String(), "error", health.LastError)
	}
}
