package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/vipgate/vipgate/test/machine"
)

// firstBound is how long everything may take to come up at first.
const firstBound = 30 * time.Second

// evidenceLines is how many last lines of each log a failure shows.
const evidenceLines = 15

// run builds the lab, breaks and heals it, evaluates the updates, and clears up.
func run(ctx context.Context, o options, out *printer) (err error) {
	begin := time.Now()
	out.printf("seed %d, %d faults; again: %s", o.seed, o.faults, o.again())
	var obs *observer
	fx, err := newFixture(o, out, func(v violation) {
		if obs != nil {
			obs.report(v)
		}
	})
	// With an error newFixture may return a fixture, whose logs are kept before it is closed.
	if fx == nil {
		return err
	}
	s := Summary{
		Machine: machine.Describe(ctx, o.binaries), Seed: o.seed, External: o.external, Faults: o.faults,
		Kinds: map[string]int{},
	}
	var l *leaks
	defer func() {
		if obs != nil {
			s.conclude(obs, l, begin, err)
			s.print(out)
			obs.close()
			if o.json != "" {
				err = errors.Join(err, s.write(o.json))
			}
		}
		// An interrupted run is not a failure and keeps no logs.
		if err != nil && ctx.Err() == nil {
			dir, errKeep := keepLogs(fx, o.seed)
			out.printf("the logs are in %s", dir)
			err = errors.Join(err, errKeep)
		}
		if errClose := fx.close(); errClose != nil {
			err = errors.Join(err, fmt.Errorf("clearing up: %w", errClose))
		}
	}()
	if err != nil {
		return err
	}
	obs = newObserver(fx)
	l = newLeaks(fx)
	if err := calm(ctx, out, obs, l, time.Now(), firstBound); err != nil {
		return err
	}
	for _, g := range plan(o.seed, o.faults, o.catalog()) {
		s.Groups++
		out.printf("%s  group %d: %s", time.Now().Format(timeFormat), g.Number, g.what())
		for _, f := range g.Faults {
			s.Kinds[f.Kind.Name]++
			s.Injected++
		}
		if err := runGroup(ctx, fx, obs, g); err != nil {
			return err
		}
		bound := recoveryBound
		if o.external {
			bound += frrStart
		}
		if err := calm(ctx, out, obs, l, time.Now(), bound); err != nil {
			return err
		}
	}
	return fx.tb.failed()
}

// conclude fills the summary from the observations.
func (s *Summary) conclude(obs *observer, l *leaks, begin time.Time, err error) {
	s.Took, s.Passed, s.Holds, s.Excused = time.Since(begin), err == nil, summarize(obs.measures, s.External), obs.excused
	s.LatestTimer = obs.processes.worst
	for _, d := range obs.recovered {
		s.SlowestRecovery = max(s.SlowestRecovery, d)
	}
	if l != nil {
		s.Most = l.most
	}
	if err != nil {
		s.Problem = strings.Split(err.Error(), "\n")
	}
}

// what describes the updates that a group may cause.
func (g group) what() string {
	what := g.Breadth.String()
	if g.Breadth == ofGateway {
		what = gatewayName(g.Gateway)
	}
	if g.Serial {
		what += ", one after another"
	}
	return what
}

// runGroup injects the faults of a group, each at its time, and returns when all are
// healed.
func runGroup(ctx context.Context, fx *fixture, obs *observer, g group) error {
	begin := time.Now()
	var wg sync.WaitGroup
	errs := make([]error, len(g.Faults))
	for i, f := range g.Faults {
		wg.Go(func() {
			if !sleep(ctx, time.Until(begin.Add(f.Start))) {
				return
			}
			errs[i] = hit(ctx, fx, obs, f)
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(errs...)
}

// hit injects one fault and heals it.
func hit(ctx context.Context, fx *fixture, obs *observer, f fault) error {
	obs.injected(injection{fault: f, from: time.Now()})
	fx.out.printf("%s  %4d  %-8s %s", time.Now().Format(timeFormat), f.ID, short(f.Duration), f)
	heal, err := f.Kind.inject(ctx, fx, f)
	if err == nil {
		sleep(ctx, f.Duration)
	}
	if heal != nil {
		// Also after an interrupt: a goroutine of the fault may run.
		err = errors.Join(err, heal(context.WithoutCancel(ctx)))
	}
	if err != nil {
		return fmt.Errorf("fault %d, %s: %w", f.ID, f, err)
	}
	return nil
}

// sleep waits, and reports whether ctx did not end first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// settlings is how often the state at a calm point may break again.
const settlings = 5

// calm waits until all VIPs are held and the counts are normal, and evaluates the window before
// it.
func calm(ctx context.Context, out *printer, obs *observer, l *leaks, healed time.Time, bound time.Duration) error {
	var violations []violation
	var took time.Duration
	for range settlings {
		var err error
		if took, violations, err = obs.settle(ctx, healed, bound); err != nil {
			return err
		}
		if len(violations) > 0 {
			if err := obs.collect(); err != nil {
				return err
			}
			break
		}
		begin := time.Now()
		probed := obs.probe(ctx)
		if len(probed) > 0 {
			if err := obs.collect(); err != nil {
				return err
			}
			// A VIP that left a gateway again cannot be reached through it: the bound of settle counts.
			if obs.receivedSince(begin) {
				out.note("not calm yet: gateways received updates during the probes")
				continue
			}
		}
		violations = append(violations, probed...)
		leaked, err := l.check(ctx)
		if err != nil {
			return err
		}
		violations = append(violations, leaked...)
		if !sleep(ctx, restTime) {
			return context.Cause(ctx)
		}
		if err := obs.collect(); err != nil {
			return err
		}
		if obs.holdsAll(ctx) {
			break
		}
		// A session may end after the heal: TCP retransmits after as long as the loss lasted, and the
		// hold timer may be first. The bound of settle counts from the heal.
		out.note("not calm yet: a gateway received updates")
		if now := time.Now(); obs.processes.lateness(now.Add(-3*time.Second), now) > excuse {
			healed = now
		}
	}
	first := obs.since.IsZero()
	if first {
		// Updates at the start need no reason.
		obs.injected(injection{fault: fault{Kind: simple("start", 0, once, wide, everything)}})
	}
	more := obs.evaluate()
	if first {
		more = nil // nothing was held before it
	} else {
		obs.recovered = append(obs.recovered, took)
	}
	if violations = append(violations, more...); len(violations) > 0 {
		return fail(out, obs, violations)
	}
	out.printf("%s  calm: every VIP at every gateway again after %s", time.Now().Format(timeFormat), short(took))
	return nil
}

// fail prints the evidence and returns the violations as an error.
func fail(out *printer, obs *observer, violations []violation) error {
	out.printf("")
	for _, line := range obs.evidence(violations[0]) {
		out.printf("  | %s", line)
	}
	if unhealthy := obs.fixture.timeline.unhealthy(); len(unhealthy) > 0 {
		out.printf("  | now: %s", strings.Join(unhealthy, ", "))
	}
	for _, p := range obs.fixture.logs() {
		out.printf("  == last lines of %s (pid %d)", p.Name, p.PID())
		for line := range strings.Lines(p.Tail(evidenceLines)) {
			out.printf("  | %s", strings.TrimRight(line, "\n"))
		}
	}
	var errs []error
	for i, v := range violations {
		if i == 20 {
			errs = append(errs, fmt.Errorf("and %d more", len(violations)-i))
			break
		}
		errs = append(errs, errors.New(v.what))
	}
	return errors.Join(errs...)
}
