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
	solicited  time.Time
	solicitErr string
}

func (p *Plane) unsubscribe() {
	if p.watch == nil {
		return
	}
	if err := p.watch.Close(); err != nil {
		p.e.log.Warn("failed to close netlink subscription", "error", err)
	}
	p.watch = nil
}

func (p *Plane) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer p.e.pulse.End()
	for {
		p.e.pulse.Next(0)
		var listenErr error
		if p.watch == nil {
			// Subscribe before the read, so that no change between the two is missed.
			if p.watch, listenErr = p.subscribe(p.e.options.Config); listenErr == nil {
				p.watch.IgnoreOwn(p.conn) // the engine reads its own changes back
				p.e.stale = everything
			} else {
				p.e.log.Warn("netlink subscription failed, retrying", "error", listenErr)
			}
		}
		desired, reconfigured := p.desired.Get()
		failed := p.step(desired) || listenErr != nil
		next := time.Until(p.nextStep(failed))
		timer.Reset(next)
		p.e.pulse.Next(next)
		var changed, broken <-chan struct{}
		if p.watch != nil {
			changed, broken = p.watch.Changed, p.watch.Failed()
		}
		if p.e.stale != 0 && p.e.readErr == nil {
			changed = nil // events are pending; wait for the read interval
		}
		for due := false; !due; {
			due = true
			select {
			case <-ctx.Done():
				return
			case <-reconfigured:
			case <-timer.C:
			case do := <-p.requests:
				do(p.e)
			case <-changed:
				due = p.handleEvents(p.watch.Take())
			case <-broken:
				p.e.log.Warn("netlink subscription failed, resubscribing", "error", p.watch.Err())
				p.unsubscribe()
				if p.retry.Wait(ctx) != nil {
					return
				}
			}
		}
	}
}

// nextStep returns the time of the next step without an event.
func (p *Plane) nextStep(failed bool) time.Time {
	e, now := p.e, time.Now()
	due := append(e.deadlines(), e.lastFullRead.Add(p.checkInterval))
	if failed {
		// Overdue deadlines wait for the next attempt.
		due = slices.DeleteFunc(due, func(at time.Time) bool { return !at.After(now) })
		due = append(due, now.Add(p.retry.Next()))
	} else {
		p.retry.Reset()
		if e.desired != nil && e.any(func(m *streamRecord) bool { return m.dirty && !m.failed }) {
			return now
		}
	}
	due = append(due, p.sysctlsChecked.Add(sysctlInterval))
	if e.stale != 0 && e.readErr == nil {
		due = append(due, p.nextRead())
	}
	if e.hasFailedNeighbors() {
		// The kernel does not report every recovered neighbor.
		due = append(due, e.lastRead.Add(failedNeighborInterval))
	}
	return slices.MinFunc(due, time.Time.Compare)
}

// nextRead returns the earliest time of the next read. It limits the engine's load while another
// process changes the kernel continuously. Links and neighbors are read earlier.
func (p *Plane) nextRead() time.Time {
	interval := min(max(minReadInterval, 10*p.e.readTime), maxReadInterval)
	if p.e.stale&network != 0 {
		interval = min(interval, networkReadInterval)
	}
	at, settled := p.e.lastRead.Add(interval), p.lastLinkDown.Add(linkSettleTime)
	if settled.After(at) {
		return settled
	}
	return at
}

// handleEvents marks changed parts as stale and reports whether a step is due. Notifications of
// own transactions are recognized by the ruleset generation.
func (p *Plane) handleEvents(n fwstate.Events) bool {
	if n.Sysctls {
		p.sysctlsChecked = time.Time{}
	}
	if len(n.LinksDown) > 0 && time.Since(p.lastLinkDown) > time.Second {
		p.lastLinkDown = time.Now()
	}
	if n.Ruleset && p.e.foreignTransaction() {
		p.e.stale |= nftables
	}
	if n.Routes || n.Links {
		p.e.stale |= routes
	}
	if n.Links || n.Neighbors {
		p.e.stale |= network
	}
	p.e.linksDown = append(p.e.linksDown, n.LinksDown...)
	return p.e.stale != 0 || n.Sysctls
}

// step observes, reconciles and publishes the state. It reports whether a retry is necessary.
func (p *Plane) step(desired *plan.Desired) (failed bool) {
	e, now := p.e, time.Now()
	if now.Sub(p.sysctlsChecked) >= sysctlInterval {
		p.sysctlsChecked, p.sysctlProblems = now, sysctlProblems(p.conn)
	}
	if e.targets == nil {
		if err := e.load(); err != nil {
			p.publish(desired, err)
			return true
		}
	}
	if now.Sub(e.lastFullRead) >= p.checkInterval {
		e.stale = everything
		clear(e.fwmarks.refused)
	}
	if e.hasFailedNeighbors() && now.Sub(e.lastRead) >= failedNeighborInterval {
		e.stale |= network
	}
	e.holds.expire(e.now())
	network := e.network
	e.observe(!now.Before(p.nextRead()))
	e.pulse.Next(0)
	if network != e.network || p.sysctlsChecked.Equal(now) { // gateways and targets may have changed
		p.mtuProblems = e.mtuProblems()
	}
	if e.readErr == nil && e.desired != nil && e.repairsAreSlow() {
		// Publish the drift first, because readiness must not wait for a long repair.
		p.publish(e.desired, nil)
	}
	if desired != nil && desired.RoutesOnly {
		e.routeOnly(desired)
		desired = nil
	}
	e.converge(desired, false)
	e.pulse.Next(0)
	if desired != nil {
		e.removeOldRules()
	}
	if e.hasFailedNeighbors() && now.Sub(p.solicited) >= failedNeighborInterval {
		p.solicited = now
		p.solicitFailed()
	}
	p.publish(desired, e.readErr)
	return e.readErr != nil || e.failing()
}

// solicitFailed triggers probes of the failed neighbors of targets. Health checks trigger them
// too, but not in every family. A repeated failure is logged once.
func (p *Plane) solicitFailed() {
	silent := map[netip.Addr]struct{}{}
	for _, m := range p.e.streams {
		for a := range m.addresses {
			if _, failed := p.e.network.FailedNeighbors[a]; failed {
				silent[a] = struct{}{}
			}
		}
	}
	failure := ""
	if err := p.conn.SolicitNeighbors(silent); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != p.solicitErr {
		p.e.log.Warn("failed to probe failed neighbors", "error", failure)
	}
	p.solicitErr = failure
}

// publish sets the state if it changed.
func (p *Plane) publish(desired *plan.Desired, err error) {
	e, old := p.e, p.state.Load()
	s := plan.State{
		Err: err, TotalFailures: old.TotalFailures, Held: e.holds.until, Repairs: e.repairs.total,
		Streams: make(map[string]*plan.StreamState, len(old.Streams)), VIPs: make(map[vip.VIP]string, len(old.VIPs)),
		Unreachable: map[netip.Addr]string{},
	}
	if desired != nil {
		s.Revision = desired.Revision
	}
	if e.network != nil {
		e.describe(&s)
	}
	s.Problems = append(s.Problems, p.mtuProblems...)
	for _, x := range p.sysctlProblems {
		s.Problems = append(s.Problems, x.Problem)
		if x.drops && s.Withheld[x.family] == "" {
			s.Withheld[x.family] = fmt.Sprintf("%s: %s; run %s", x.Object, x.Detail, x.Remedy)
		}
	}
	if err != nil {
		s.Failures, s.TotalFailures = old.Failures+1, old.TotalFailures+1
		if old.Err == nil || old.Err.Error() != err.Error() {
			e.log.Error("data plane update failed", "error", err, "failures", s.Failures)
		}
	} else if old.Err != nil {
		e.log.Info("data plane update succeeded again", "failures", old.Failures)
	}
	for _, x := range plan.Without(s.Problems, old.Problems, Problem.Key) {
		e.log.Error("data plane problem", "object", x.Object, "detail", x.Detail, "remedy", x.Remedy)
	}
	for _, x := range plan.Without(old.Problems, s.Problems, Problem.Key) {
		e.log.Info("data plane problem resolved", "object", x.Object, "detail", x.Detail)
	}
	if old.At.IsZero() || !sameState(old, s) {
		s.At = time.Now()
		p.state.Set(s)
		afterStep("published")
	}
	select {
	case <-p.ready:
	default:
		if err == nil {
			e.log.Info("data plane read from the kernel",
				"streams", len(e.streams), "targets", len(e.targets))
			close(p.ready)
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
