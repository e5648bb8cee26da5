package dataplane

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// minReadInterval is the minimum time between two reads after notifications.
	minReadInterval = 20 * time.Millisecond
	// maxReadInterval is the maximum delay of a read, so that drift is repaired within a second.
	maxReadInterval = 500 * time.Millisecond
	// failurePause is the first delay after a failure; it doubles up to maxPause.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// networkReadInterval is the maximum delay of a read of links and neighbors.
	networkReadInterval = 250 * time.Millisecond
	// linkSettleTime delays a read after a link went down: it may come up again immediately.
	linkSettleTime = 100 * time.Millisecond
	// failedNeighborInterval is the period of reads while neighbors are failed.
	failedNeighborInterval = time.Second
	// fullReadInterval is the period of full reads without notifications.
	fullReadInterval = time.Minute
)

// reconciler schedules the engine. Only the goroutine of Run accesses it.
type reconciler struct {
	e             *engine
	conn          *fwstate.Conn
	subscribe     func(fwstate.Config) (*fwstate.Watch, error)
	watch         *fwstate.Watch
	retry         backoff.Backoff
	checkInterval time.Duration

	sysctlsChecked time.Time
	sysctlProblems []sysctlProblem
	mtuProblems    []Problem
	// lastLinkDown is the time of a link failure, updated at most once per second, so that a flapping
	// link does not postpone reads indefinitely.
	lastLinkDown time.Time
	// solicited is the time of the last neighbor probes, solicitErr their last failure.
	solicited    time.Time
	solicitErr   string
	nextEviction time.Time // of expired flows
}

func (plane *Plane) unsubscribe() {
	if plane.watch == nil {
		return
	}
	if err := plane.watch.Close(); err != nil {
		plane.e.log.Warn("failed to close netlink subscription", "error", err)
	}
	plane.watch = nil
}

func (plane *Plane) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer plane.e.pulse.End()
	for {
		plane.e.pulse.Next(0)
		var listenErr error
		if plane.watch == nil {
			// Subscribe before the read, so that no change between the two is missed.
			if plane.watch, listenErr = plane.subscribe(plane.e.options.Config); listenErr == nil {
				plane.watch.IgnoreOwn(plane.conn) // the engine reads its own changes back
				plane.e.stale = everything
			} else {
				plane.e.log.Warn("netlink subscription failed, retrying", "error", listenErr)
			}
		}
		desired, reconfigured := plane.desired.Get()
		failed := plane.step(desired) || listenErr != nil
		next := time.Until(plane.nextStep(failed))
		timer.Reset(next)
		plane.e.pulse.Next(next)
		var changed, broken <-chan struct{}
		if plane.watch != nil {
			changed, broken = plane.watch.Changed, plane.watch.Failed()
		}
		if plane.e.stale != 0 && plane.e.readErr == nil {
			changed = nil // events are pending; wait for the read interval
		}
		for due := false; !due; {
			due = true
			select {
			case <-ctx.Done():
				return
			case <-reconfigured:
			case <-timer.C:
			case do := <-plane.requests:
				do(plane.e)
			case <-changed:
				due = plane.handleEvents(plane.watch.Take())
			case <-broken:
				plane.e.log.Warn("netlink subscription failed, resubscribing", "error", plane.watch.Err())
				plane.unsubscribe()
				if plane.retry.Wait(ctx) != nil {
					return
				}
			}
		}
	}
}

// nextStep returns the time of the next step without an event.
func (plane *Plane) nextStep(failed bool) time.Time {
	engine, now := plane.e, time.Now()
	due := append(engine.deadlines(), engine.lastFullRead.Add(plane.checkInterval))
	if failed {
		// Overdue deadlines wait for the next attempt.
		due = slices.DeleteFunc(due, func(at time.Time) bool { return !at.After(now) })
		due = append(due, now.Add(plane.retry.Next()))
	} else {
		plane.retry.Reset()
		if engine.desired != nil && engine.any(func(m *streamRecord) bool { return m.dirty && !m.failed }) {
			return now
		}
	}
	due = append(due, plane.sysctlsChecked.Add(sysctlInterval))
	if engine.stale != 0 && engine.readErr == nil {
		due = append(due, plane.nextRead())
	}
	if engine.hasFailedNeighbors() {
		// The kernel does not report every recovered neighbor.
		due = append(due, engine.lastRead.Add(failedNeighborInterval))
	}
	return slices.MinFunc(due, time.Time.Compare)
}

// nextRead returns the earliest time of the next read. It limits the engine's load while another
// process changes the kernel continuously. Links and neighbors are read earlier.
func (plane *Plane) nextRead() time.Time {
	interval := min(max(minReadInterval, 10*plane.e.readTime), maxReadInterval)
	if plane.e.stale&network != 0 {
		interval = min(interval, networkReadInterval)
	}
	at, settled := plane.e.lastRead.Add(interval), plane.lastLinkDown.Add(linkSettleTime)
	if settled.After(at) {
		return settled
	}
	return at
}

// handleEvents marks changed parts as stale and reports whether a step is due. Notifications of
// own transactions are recognized by the ruleset generation.
func (plane *Plane) handleEvents(events fwstate.Events) bool {
	if events.Sysctls {
		plane.sysctlsChecked = time.Time{}
	}
	if len(events.LinksDown) > 0 && time.Since(plane.lastLinkDown) > time.Second {
		plane.lastLinkDown = time.Now()
	}
	if events.Ruleset && plane.e.foreignTransaction() {
		plane.e.stale |= nftables
	}
	if events.Routes || events.Links {
		plane.e.stale |= routes
	}
	if events.Links || events.Neighbors {
		plane.e.stale |= network
	}
	plane.e.linksDown = append(plane.e.linksDown, events.LinksDown...)
	return plane.e.stale != 0 || events.Sysctls
}

// step observes, reconciles and publishes the state. It reports whether a retry is necessary.
func (plane *Plane) step(desired *plan.Desired) (failed bool) {
	engine, now := plane.e, time.Now()
	if now.Sub(plane.sysctlsChecked) >= sysctlInterval {
		plane.sysctlsChecked, plane.sysctlProblems = now, sysctlProblems(plane.conn)
	}
	if engine.targets == nil {
		if err := engine.load(); err != nil {
			plane.publish(desired, err)
			return true
		}
	}
	if now.Sub(engine.lastFullRead) >= plane.checkInterval {
		engine.stale = everything
		// The other process may have released its fwmarks.
		clear(engine.fwmarks.refused)
	}
	if engine.hasFailedNeighbors() && now.Sub(engine.lastRead) >= failedNeighborInterval {
		engine.stale |= network
	}
	engine.holds.expire(engine.now())
	network := engine.network
	engine.observe(!now.Before(plane.nextRead()))
	engine.pulse.Next(0)
	if network != engine.network || plane.sysctlsChecked.Equal(now) { // gateways and targets may have changed
		if engine.options.Gateways != nil && engine.network != nil {
			plane.mtuProblems = engine.network.MTUProblems(engine.options.Gateways(), engine.targetAddresses)
		}
	}
	if engine.readErr == nil && engine.desired != nil && engine.repairsAreSlow() {
		// Publish the drift first, because readiness must not wait for a long repair.
		plane.publish(engine.desired, nil)
	}
	if desired != nil && desired.RoutesOnly {
		engine.routeOnly(desired)
		desired = nil
	}
	engine.converge(desired, false)
	engine.pulse.Next(0)
	if desired != nil {
		engine.removeOldRules()
	}
	if engine.hasFailedNeighbors() && now.Sub(plane.solicited) >= failedNeighborInterval {
		plane.solicited = now
		plane.solicitFailed()
	}
	plane.publish(desired, engine.readErr)
	// After the state, because readiness must not wait for it.
	engine.updateMoved(desired)
	// After readiness, which does not depend on it.
	engine.accelerate(plane.withheld())
	if plane.sysctlsChecked.Equal(now) && now.After(plane.nextEviction) {
		plane.nextEviction = plane.conn.EvictConntrack(0.25)
	}
	return engine.readErr != nil || engine.failing()
}

// withheld returns the families whose packets a kernel parameter drops.
func (plane *Plane) withheld() (families [len(vip.Families)]bool) {
	for _, problem := range plane.sysctlProblems {
		families[problem.family] = families[problem.family] || problem.drops
	}
	return families
}

// solicitFailed triggers probes of the failed neighbors of targets. Health checks trigger them
// too, but not in every family. A repeated failure is logged once.
func (plane *Plane) solicitFailed() {
	silent := map[netip.Addr]struct{}{}
	for _, m := range plane.e.streams {
		for address := range m.addresses {
			if _, failed := plane.e.network.FailedNeighbors[address]; failed {
				silent[address] = struct{}{}
			}
		}
	}
	failure := ""
	if err := plane.conn.SolicitNeighbors(silent); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != plane.solicitErr {
		plane.e.log.Warn("failed to probe failed neighbors", "error", failure)
	}
	plane.solicitErr = failure
}

// publish sets the state if it changed.
func (plane *Plane) publish(desired *plan.Desired, err error) {
	engine, old := plane.e, plane.state.Load()
	state := plan.State{
		Err: err, TotalFailures: old.TotalFailures, Held: engine.holds.until, Repairs: engine.repairs.total,
		Streams: make(map[string]*plan.StreamState, len(old.Streams)), VIPs: make(map[vip.VIP]string, len(old.VIPs)),
		Unreachable: map[netip.Addr]string{},
	}
	if desired != nil {
		state.Revision = desired.Revision
	}
	if engine.network != nil {
		engine.describe(&state)
	}
	// These problems are found by their own periodic checks, not by the engine.
	state.Problems = append(state.Problems, plane.mtuProblems...)
	for _, problem := range plane.sysctlProblems {
		state.Problems = append(state.Problems, problem.Problem)
		if problem.drops && state.Withheld[problem.family] == "" {
			state.Withheld[problem.family] = fmt.Sprintf("%s: %s; run %s", problem.Object, problem.Detail, problem.Remedy)
		}
	}
	if err != nil {
		state.Failures, state.TotalFailures = old.Failures+1, old.TotalFailures+1
		// Log a repeated failure once: attempts follow each other within seconds.
		if old.Err == nil || old.Err.Error() != err.Error() {
			engine.log.Error("data plane update failed", "error", err, "failures", state.Failures)
		}
	} else if old.Err != nil {
		engine.log.Info("data plane update succeeded again", "failures", old.Failures)
	}
	for _, x := range plan.Without(state.Problems, old.Problems, Problem.Key) {
		engine.log.Error("data plane problem", "object", x.Object, "detail", x.Detail, "remedy", x.Remedy)
	}
	for _, x := range plan.Without(old.Problems, state.Problems, Problem.Key) {
		engine.log.Info("data plane problem resolved", "object", x.Object, "detail", x.Detail)
	}
	// Readers wake up with each state, so publish differences only.
	if old.At.IsZero() || !sameState(old, state) {
		state.At = time.Now()
		plane.state.Set(state)
		afterStep("published")
	}
	// Only this goroutine closes the channel, so the check cannot race.
	select {
	case <-plane.ready:
	default:
		if err == nil {
			engine.log.Info("data plane read from the kernel",
				"streams", len(engine.streams), "targets", len(engine.targets))
			close(plane.ready)
		}
	}
}

// sameState compares two states, ignoring the time.
func sameState(a, b plan.State) bool {
	// Compare the large maps directly, because reflection is slow.
	same := a.Revision == b.Revision && maps.Equal(a.VIPs, b.VIPs) && maps.Equal(a.Unreachable, b.Unreachable) &&
		fmt.Sprint(a.Err) == fmt.Sprint(b.Err)
	for _, s := range []*plan.State{&a, &b} {
		s.VIPs, s.Unreachable, s.Err, s.At = nil, nil, nil, time.Time{}
	}
	return same && reflect.DeepEqual(a, b)
}
