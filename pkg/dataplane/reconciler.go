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
	// minReadInterval is the shortest time between two reads after notifications.
	minReadInterval = 20 * time.Millisecond
	// maxReadInterval is the longest delay of a read, so that drift is repaired within a second.
	maxReadInterval = 500 * time.Millisecond
	// failurePause is the pause after a failure; it doubles up to maxPause.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// networkReadInterval is the longest delay of a read of links and neighbors.
	networkReadInterval = 250 * time.Millisecond
	// linkSettleTime delays a read after a link went down: it may be up again at once.
	linkSettleTime = 100 * time.Millisecond
	// failedNeighborInterval is the time between two reads of failed neighbors.
	failedNeighborInterval = time.Second
)

// reconciler schedules the engine.
type reconciler struct {
	p         *Plane
	e         *engine
	conn      *fwstate.Conn
	subscribe func() (*fwstate.Watch, error)
	watch     *fwstate.Watch
	retry     backoff.Backoff

	sysctlsChecked time.Time
	sysctlProblems []sysctlProblem
	// oldRulesRemoved: rules that were installed with other options are removed.
	oldRulesRemoved bool
	// lastLinkDown is when a link went down, updated at most once a second.
	lastLinkDown time.Time
	// solicited is when neighbors were last probed, solicitErr the last failure.
	solicited  time.Time
	solicitErr string
}

func newReconciler(p *Plane, conn *fwstate.Conn) *reconciler {
	return &reconciler{
		p: p, e: newEngine(p.o, conn), conn: conn, retry: backoff.Backoff{Min: failurePause, Max: maxPause},
		subscribe: func() (*fwstate.Watch, error) {
			w, err := fwstate.Subscribe(p.o.Config)
			if err == nil {
				w.IgnoreOwn(conn) // the engine reads its own changes back
			}
			return w, err
		},
	}
}

func (o *reconciler) unsubscribe() {
	if o.watch == nil {
		return
	}
	if err := o.watch.Close(); err != nil {
		o.e.log.Warn("failed to close netlink subscription", "error", err)
	}
	o.watch = nil
}

func (o *reconciler) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var listenErr error
		if o.watch == nil {
			// Subscribe before the read, so that no change between them is missed.
			if o.watch, listenErr = o.subscribe(); listenErr == nil {
				o.e.stale = everything
			} else {
				o.e.log.Warn("netlink subscription failed, retrying", "error", listenErr)
			}
		}
		desired, reconfigured := o.p.desired.Get()
		failed := o.step(desired) || listenErr != nil
		timer.Reset(time.Until(o.nextStep(failed)))
		var changed, broken <-chan struct{}
		if o.watch != nil {
			changed, broken = o.watch.Changed, o.watch.Failed()
		}
		if o.e.stale != 0 && o.e.readErr == nil {
			changed = nil // events are pending; wait for the read interval
		}
		select {
		case <-ctx.Done():
			return
		case <-reconfigured:
		case <-timer.C:
		case do := <-o.p.requests:
			do(o.e)
		case <-changed:
			o.handleEvents(o.watch.Take())
		case <-broken:
			o.e.log.Warn("netlink subscription failed, resubscribing", "error", o.watch.Err())
			o.unsubscribe()
			if o.retry.Wait(ctx) != nil {
				return
			}
		}
	}
}

// nextStep returns when the next step is due without an event.
func (o *reconciler) nextStep(failed bool) time.Time {
	e, now := o.e, time.Now()
	due := append(e.deadlines(), e.lastFullRead.Add(o.p.o.CheckInterval))
	if failed {
		// What is overdue waits for the next attempt.
		due = slices.DeleteFunc(due, func(at time.Time) bool { return !at.After(now) })
		due = append(due, now.Add(o.retry.Next()))
	} else {
		o.retry.Reset()
		if e.hasDirty() {
			return now
		}
	}
	due = append(due, o.sysctlsChecked.Add(sysctlInterval))
	if e.stale != 0 && e.readErr == nil {
		due = append(due, o.nextRead())
	}
	if e.hasFailedNeighbors() {
		// The kernel does not notify every neighbor that is reachable again.
		due = append(due, e.lastRead.Add(failedNeighborInterval))
	}
	return slices.MinFunc(due, time.Time.Compare)
}

// nextRead returns the earliest time of the next read, so that a process that changes the kernel
// all the time does not keep the engine busy. It is earlier for links and neighbors.
func (o *reconciler) nextRead() time.Time {
	interval := min(max(minReadInterval, 10*o.e.readTime), maxReadInterval)
	if o.e.stale&network != 0 {
		interval = min(interval, networkReadInterval)
	}
	at, settled := o.e.lastRead.Add(interval), o.lastLinkDown.Add(linkSettleTime)
	if settled.After(at) {
		return settled
	}
	return at
}

// handleEvents marks the parts that events report as stale. Own transactions are notified as
// well; the generation of the ruleset excludes them.
func (o *reconciler) handleEvents(n fwstate.Events) {
	if n.Sysctls {
		o.sysctlsChecked = time.Time{}
	}
	if len(n.LinksDown) > 0 && time.Since(o.lastLinkDown) > time.Second {
		o.lastLinkDown = time.Now()
	}
	if n.Ruleset && o.e.foreignTransaction() {
		o.e.stale |= nftables
	}
	if n.Routes || n.Links {
		o.e.stale |= routes
	}
	if n.Links || n.Neighbors {
		o.e.stale |= network
	}
	o.e.linksDown = append(o.e.linksDown, n.LinksDown...)
}

// step observes, reconciles and publishes the state. It reports whether something failed and
// is retried.
func (o *reconciler) step(desired *Desired) (failed bool) {
	e, now := o.e, time.Now()
	if now.Sub(o.sysctlsChecked) >= sysctlInterval {
		o.sysctlsChecked, o.sysctlProblems = now, sysctlProblems(o.conn)
	}
	if e.installed == nil {
		if err := e.load(); err != nil {
			o.publish(desired, err)
			return true
		}
	}
	if now.Sub(e.lastFullRead) >= o.p.o.CheckInterval {
		e.stale = everything
		clear(e.refused)
	}
	if e.hasFailedNeighbors() && now.Sub(e.lastRead) >= failedNeighborInterval {
		e.stale |= network
	}
	e.expireHolds()
	e.observe(!now.Before(o.nextRead()))
	if e.readErr == nil && e.desired != nil && e.repairsAreSlow() {
		// Readiness must not wait for a long repair.
		o.publish(e.desired, nil)
	}
	e.converge(desired, false)
	if desired != nil && !o.oldRulesRemoved && e.readErr == nil && !e.failing() && len(e.drift()) == 0 {
		err := o.conn.RemoveOldRules()
		if err != nil {
			e.log.Warn("failed to remove policy rules that were installed with other options", "error", err)
		}
		o.oldRulesRemoved = err == nil
	}
	if e.hasFailedNeighbors() && now.Sub(o.solicited) >= failedNeighborInterval {
		o.solicited = now
		o.solicitFailed()
	}
	o.publish(desired, e.readErr)
	return e.readErr != nil || e.failing()
}

// solicitFailed makes the kernel probe the failed neighbors of targets. Health checks probe them as
// well, but not in every family; so a failure is logged once.
func (o *reconciler) solicitFailed() {
	silent := map[netip.Addr]struct{}{}
	for _, m := range o.e.streams {
		for a := range m.addresses {
			if _, failed := o.e.network.FailedNeighbors[a]; failed {
				silent[a] = struct{}{}
			}
		}
	}
	failure := ""
	if err := o.conn.SolicitNeighbors(silent); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != o.solicitErr {
		o.e.log.Warn("failed to probe failed neighbors", "error", failure)
	}
	o.solicitErr = failure
}

// publish sets the state if it changed.
func (o *reconciler) publish(desired *Desired, err error) {
	e, old := o.e, o.p.state.Load()
	s := State{
		Err: err, Held: e.holds, Repairs: e.repaired, Withheld: withheld(o.sysctlProblems),
		TotalFailures: old.TotalFailures,
		Streams:       map[string]*StreamState{}, VIPs: map[vip.VIP]string{}, Unreachable: map[netip.Addr]string{},
	}
	if desired != nil {
		s.Revision = desired.Revision
	}
	if e.network != nil {
		e.describe(&s)
	}
	for _, p := range o.sysctlProblems {
		s.Problems = append(s.Problems, p.Problem)
	}
	if err != nil {
		s.Failures, s.TotalFailures = old.Failures+1, old.TotalFailures+1
		if old.Err == nil || old.Err.Error() != err.Error() {
			e.log.Error("data plane update failed", "error", err, "failures", s.Failures)
		}
	} else if old.Err != nil {
		e.log.Info("data plane update succeeded again", "failures", old.Failures)
	}
	for _, p := range plan.Without(s.Problems, old.Problems, Problem.Key) {
		e.log.Error("data plane problem", "object", p.Object, "detail", p.Detail, "remedy", p.Remedy)
	}
	for _, p := range plan.Without(old.Problems, s.Problems, Problem.Key) {
		e.log.Info("data plane problem resolved", "object", p.Object, "detail", p.Detail)
	}
	if old.At.IsZero() || !sameState(old, s) {
		s.At = time.Now()
		o.p.state.Set(s)
		afterStep("published")
	}
	select {
	case <-o.p.ready:
	default:
		if err == nil {
			e.log.Info("data plane read from the kernel",
				"streams", len(e.installed.Streams), "targets", len(e.installed.Targets))
			close(o.p.ready)
		}
	}
}

// sameState compares everything except the time.
func sameState(a, b State) bool {
	// The maps are large, and reflection is slow.
	same := maps.Equal(a.VIPs, b.VIPs) && maps.Equal(a.Unreachable, b.Unreachable) && fmt.Sprint(a.Err) == fmt.Sprint(b.Err)
	for _, s := range []*State{&a, &b} {
		s.VIPs, s.Unreachable, s.Err, s.At = nil, nil, nil, time.Time{}
	}
	return same && reflect.DeepEqual(a, b)
}
