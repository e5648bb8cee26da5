package dataplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
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
	// defaultCheckInterval is the time between two reads of everything.
	defaultCheckInterval = time.Minute
)

// subscribeExcept subscribes to changes by other connections than f, whose own changes the
// engine reads back.
func subscribeExcept(f *fwstate.Conn) func(fwstate.Config) (*fwstate.Watch, error) {
	return func(c fwstate.Config) (*fwstate.Watch, error) {
		w, err := fwstate.Subscribe(c)
		if err == nil {
			w.IgnoreOwn(f)
		}
		return w, err
	}
}

// reconciler schedules the engine.
type reconciler struct {
	p         *Plane
	e         *engine
	subscribe func(fwstate.Config) (*fwstate.Watch, error)
	// solicit makes the kernel probe failed neighbors.
	solicit func(map[netip.Addr]struct{}) error
	// checkSysctl returns the wrong kernel parameters.
	checkSysctl    func() []sysctlProblem
	sysctlsChecked time.Time
	sysctlProblems []sysctlProblem
	watch          *fwstate.Watch
	// removeOld removes rules that were installed with other options; removed is set once
	// it succeeded.
	removeOld func() error
	removed   bool
	// loaded: what an earlier process installed was recovered.
	loaded bool
	pause  time.Duration
	// lastRead is when the engine last read the kernel, and readTime how long that took. The
	// next read waits ten times as long.
	lastRead time.Time
	readTime time.Duration
	// lastLinkDown is when a link went down, updated at most once a second.
	lastLinkDown time.Time
	// lastFullRead and lastNetworkRead are when everything, and links and neighbors, were
	// last read.
	lastFullRead, lastNetworkRead time.Time
	// solicited is when neighbors were last probed, solicitErr the last failure.
	solicited  time.Time
	solicitErr string
}

func (o *reconciler) unsubscribe() {
	if o.watch == nil {
		return
	}
	if err := o.watch.Close(); err != nil {
		o.p.o.Log.Warn("failed to close netlink subscription", "error", err)
	}
	o.watch = nil
}

func (o *reconciler) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var listenErr error
		if o.watch == nil {
			// Subscribe before the read, so that no change between them is missed.
			if o.watch, listenErr = o.subscribe(o.p.o.config()); listenErr == nil {
				o.e.stale.nftables, o.e.stale.routes, o.e.stale.network = true, true, true
			}
		}
		desired, reconfigured := o.p.desired.Get()
		o.updateSysctls(time.Now())
		failed := o.step(desired, listenErr)

		next := time.Until(o.lastFullRead.Add(o.p.o.CheckInterval))
		if o.checkSysctl != nil {
			next = min(next, time.Until(o.sysctlsChecked.Add(sysctlInterval)))
		}
		if failed {
			next = min(next, o.pause)
			o.pause = min(2*o.pause, maxPause)
		} else {
			o.pause = failurePause
		}
		for _, at := range o.deadlines() {
			// Overdue deadlines wait for the next attempt after a failure.
			if left := time.Until(at); left > 0 || !failed {
				next = min(next, left)
			}
		}
		var changed, broken <-chan struct{}
		if o.watch != nil {
			changed, broken = o.watch.Changed, o.watch.Failed
		}
		if o.e.mustRead() && o.e.readErr == nil {
			// Events are pending; wait for the read interval.
			changed = nil
			next = min(next, time.Until(o.nextRead()))
		}
		if o.e.hasFailedNeighbors() {
			// The kernel does not notify every neighbor that is reachable again.
			next = min(next, time.Until(o.lastNetworkRead.Add(failedNeighborInterval)))
		}
		if !failed && o.e.hasDirty() {
			next = 0
		}
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return nil
		case <-reconfigured:
		case <-timer.C:
		case do := <-o.p.requests:
			do(o.e)
		case <-changed:
			o.handleEvents(o.watch.Take())
		case <-broken:
			o.p.o.Log.Warn("netlink subscription failed, resubscribing", "error", o.watch.Err)
			o.unsubscribe()
			if !pause(ctx, o.pause, reconfigured) {
				return nil
			}
			o.pause = min(2*o.pause, maxPause)
		}
	}
}

// deadlines returns the next ends of drains, back-offs of repairs, and holds.
func (o *reconciler) deadlines() (list []time.Time) {
	for _, next := range []func() (time.Time, bool){o.e.nextDrain, o.e.nextRepair, o.e.expireHolds} {
		if at, ok := next(); ok {
			list = append(list, at)
		}
	}
	return list
}

// pause waits for a time or for news. It returns false if ctx ended.
func pause(ctx context.Context, pause time.Duration, news <-chan struct{}) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-news:
	case <-t.C:
	}
	return true
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
	need := &o.e.stale
	need.nftables = need.nftables || n.Ruleset && o.e.foreignTransaction()
	need.routes = need.routes || n.Routes || n.Links
	need.network = need.network || n.Links || n.Neighbors
	need.linksDown = append(need.linksDown, n.LinksDown...)
}

// step observes, reconciles and publishes the state. It reports whether something failed and
// is retried.
func (o *reconciler) step(desired *Desired, listenErr error) (failed bool) {
	e, log := o.e, o.p.o.Log
	now := time.Now()
	if !o.loaded {
		if err := o.load(); err != nil {
			o.publish(desired, err)
			return true
		}
	}
	if now.Sub(o.lastFullRead) >= o.p.o.CheckInterval {
		e.stale.nftables, e.stale.routes, e.stale.network = true, true, true
		clear(e.refused)
	}
	if e.hasFailedNeighbors() && now.Sub(o.lastNetworkRead) >= failedNeighborInterval {
		e.stale.network = true
	}
	later := staleParts{}
	if now.Before(o.nextRead()) && e.observed != nil {
		later = e.stale
		e.stale = staleParts{}
	}
	whole := e.stale.nftables
	looking := e.mustRead()
	e.expireHolds()
	e.observe()
	if e.readErr == nil && e.desired != nil && e.repairsAreSlow() {
		// Readiness must not wait for a long repair.
		o.publish(e.desired, nil)
	}
	e.converge(desired, false)
	if desired != nil && !o.removed && e.readErr == nil && !e.failing() && len(e.drift()) == 0 {
		if err := o.removeOld(); err != nil {
			log.Warn("failed to remove policy rules that were installed with other options", "error", err)
		} else {
			o.removed = true
		}
	}
	if looking {
		o.lastRead, o.lastNetworkRead, o.readTime = now, now, e.readTime
	}
	if whole && e.readErr == nil {
		o.lastFullRead = now
	}
	if e.hasFailedNeighbors() && now.Sub(o.solicited) >= failedNeighborInterval {
		o.solicited = now
		o.solicitFailed()
	}
	e.stale.merge(later)
	err := e.readErr
	if listenErr != nil {
		log.Warn("netlink subscription failed, retrying", "error", listenErr)
	}
	o.publish(desired, err)
	if e.readErr == nil {
		o.signalReady()
	}
	return err != nil || listenErr != nil || e.failing()
}

// solicitFailed makes the kernel probe the failed neighbors of targets. A failure is logged
// once: health checks probe them, too.
func (o *reconciler) solicitFailed() {
	failure := ""
	if err := o.solicit(o.e.failedTargets()); err != nil {
		failure = err.Error()
	}
	if failure != "" && failure != o.solicitErr {
		o.p.o.Log.Warn("failed to probe failed neighbors", "error", failure)
	}
	o.solicitErr = failure
}

// nextRead is the earliest time of the next read.
func (o *reconciler) nextRead() time.Time {
	at := o.lastRead.Add(o.readInterval())
	if back := o.lastLinkDown.Add(linkSettleTime); back.After(at) {
		return back
	}
	return at
}

// readInterval is the time between two reads, so that a process that changes the kernel all the
// time does not keep the engine busy. It is shorter for links and neighbors.
func (o *reconciler) readInterval() time.Duration {
	pause := min(max(minReadInterval, 10*o.readTime), maxReadInterval)
	if o.e.stale.network {
		pause = min(pause, networkReadInterval)
	}
	return pause
}

func (n *staleParts) merge(m staleParts) {
	n.nftables, n.routes, n.network = n.nftables || m.nftables, n.routes || m.routes, n.network || m.network
	n.linksDown = append(n.linksDown, m.linksDown...)
}

// load recovers what is installed.
func (o *reconciler) load() error {
	if err := o.e.load(); err != nil {
		return err
	}
	o.loaded = true
	return nil
}

func (o *reconciler) signalReady() {
	select {
	case <-o.p.ready:
	default:
		o.p.o.Log.Info("data plane read from the kernel", "streams", len(o.e.installed.Streams), "targets", len(o.e.installed.Targets))
		close(o.p.ready)
	}
}

// publish sets the state if it changed.
func (o *reconciler) publish(desired *Desired, err error) {
	old := o.p.state.Load()
	s := State{Err: err, Held: o.e.holds, Repairs: o.e.repaired}
	if desired != nil {
		s.Revision = desired.Revision
	}
	if o.e.observed != nil {
		o.e.describe(&s)
	} else {
		s.Streams, s.VIPs, s.Unreachable = map[string]*StreamState{}, map[vip.VIP]string{}, map[netip.Addr]string{}
	}
	if err != nil {
		s.Failures = old.Failures + 1
		if old.Err == nil || old.Err.Error() != err.Error() {
			o.p.o.Log.Error("data plane update failed", "error", err, "failures", s.Failures)
		}
	} else if old.Err != nil {
		o.p.o.Log.Info("data plane update succeeded again", "failures", old.Failures)
	}
	for _, p := range o.sysctlProblems {
		s.Problems = append(s.Problems, p.Problem)
	}
	s.Withheld = withheld(o.sysctlProblems)
	o.logProblems(old.Problems, s.Problems)
	if !old.At.IsZero() && sameState(old, s) {
		return
	}
	s.At = time.Now()
	o.p.state.Set(s)
	fault(stepPublished)
}

func (o *reconciler) logProblems(old, now []Problem) {
	for _, p := range now {
		if !slices.ContainsFunc(old, func(q Problem) bool { return p.Object == q.Object && p.Detail == q.Detail }) {
			o.p.o.Log.Error("data plane problem", "object", p.Object, "detail", p.Detail, "remedy", p.Remedy)
		}
	}
	for _, p := range old {
		if !slices.ContainsFunc(now, func(q Problem) bool { return p.Object == q.Object && p.Detail == q.Detail }) {
			o.p.o.Log.Info("data plane problem resolved", "object", p.Object, "detail", p.Detail)
		}
	}
}

// sameState compares everything except the time.
func sameState(a, b State) bool {
	errText := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return a.Revision == b.Revision && a.Withheld == b.Withheld && a.Failures == b.Failures && errText(a.Err) == errText(b.Err) &&
		maps.EqualFunc(a.Streams, b.Streams, (*StreamState).Equal) &&
		maps.Equal(a.VIPs, b.VIPs) && maps.Equal(a.Held, b.Held) && a.Repairs == b.Repairs && maps.Equal(a.Unreachable, b.Unreachable) &&
		slices.Equal(a.Drift, b.Drift) && reflect.DeepEqual(a.Problems, b.Problems)
}

// reconcile reads everything and repairs drift without back-off, except that of held streams.
func (e *engine) reconcile(w *Desired) ([]Drift, error) {
	if w == nil || e.installed == nil {
		return nil, errors.New("nothing is configured yet; try again in a moment")
	}
	e.stale.merge(staleParts{nftables: true, routes: true, network: true})
	e.observe()
	if e.readErr != nil {
		return nil, e.readErr
	}
	before := e.drift()
	e.converge(w, true)
	if e.readErr != nil {
		return nil, e.readErr
	}
	left := e.drift()
	done := without(before, left)
	if left = slices.DeleteFunc(left, func(d Drift) bool { return e.held(d.Stream) }); len(left) > 0 {
		return done, fmt.Errorf("%d objects could not be repaired, the first is %s: %s", len(left), left[0].Object, left[0].Detail)
	}
	return done, nil
}

// updateSysctls checks the kernel parameters again after sysctlInterval or a notification.
func (o *reconciler) updateSysctls(now time.Time) {
	if o.checkSysctl == nil || now.Sub(o.sysctlsChecked) < sysctlInterval {
		return
	}
	o.sysctlsChecked = now
	o.sysctlProblems = o.checkSysctl()
}
