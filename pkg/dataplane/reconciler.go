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
	// minReadInterval is between two looks at the kernel that notifications ask for.
	minReadInterval = 20 * time.Millisecond
	// maxReadInterval is the longest pause before a look, so that drift is repaired within a second.
	maxReadInterval = 500 * time.Millisecond
	// failurePause is the pause after a failure; it doubles up to maxPause.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// networkReadInterval is the longest pause between two looks at links and neighbours.
	networkReadInterval = 250 * time.Millisecond
	// linkSettleTime lets a link that goes down and up again at once come back before a look.
	linkSettleTime = 100 * time.Millisecond
	// failedNeighborInterval is between two looks at neighbours that failed.
	failedNeighborInterval = time.Second
	// defaultCheckInterval is the time between two looks when nothing is reported.
	defaultCheckInterval = time.Minute
)

// subscribeExcept listens to what others than f do: what it did itself, the engine reads
// back, and need not hear of.
func subscribeExcept(f *fwstate.Conn) func(fwstate.Config) (*fwstate.Watch, error) {
	return func(c fwstate.Config) (*fwstate.Watch, error) {
		w, err := fwstate.Subscribe(c)
		if err == nil {
			w.IgnoreOwn(f)
		}
		return w, err
	}
}

// reconciler decides when the engine works.
type reconciler struct {
	p         *Plane
	e         *engine
	subscribe func(fwstate.Config) (*fwstate.Watch, error)
	// solicit has neighbours that failed asked again.
	solicit func(map[netip.Addr]struct{}) error
	// checkSysctl checks the kernel parameters; set is when that was, wrong what it found.
	checkSysctl    func() []sysctlProblem
	sysctlsChecked time.Time
	sysctlProblems []sysctlProblem
	watch          *fwstate.Watch
	// removeOld removes rules that were installed with other options, once: removed.
	removeOld func() error
	removed   bool
	// loaded: what is installed was read from the kernel.
	loaded bool
	pause  time.Duration
	// lastRead is when the engine last looked at the kernel, and dear how long that took:
	// it rests ten times as long, since our own changes are reported as well.
	lastRead time.Time
	readTime time.Duration
	// lastLinkDown is when a link went down, at most once a second.
	lastLinkDown time.Time
	// lastFullRead and seen are when everything, and links and neighbours, were last read.
	lastFullRead, lastNetworkRead time.Time
	// solicited is when neighbours were last asked, deaf why they could not be.
	solicited  time.Time
	solicitErr string
}

func (o *reconciler) unsubscribe() {
	if o.watch == nil {
		return
	}
	if err := o.watch.Close(); err != nil {
		o.p.o.Log.Warn("listeners for changes of the kernel could not be closed", "error", err)
	}
	o.watch = nil
}

func (o *reconciler) run(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var listenErr error
		if o.watch == nil {
			// Listen first, so that no change falls between the look and the listening.
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
			// What is overdue after a failure waits for its next attempt.
			if left := time.Until(at); left > 0 || !failed {
				next = min(next, left)
			}
		}
		var changed, broken <-chan struct{}
		if o.watch != nil {
			changed, broken = o.watch.Changed, o.watch.Failed
		}
		if o.e.mustRead() && o.e.readErr == nil {
			// Something was reported that waits for its turn.
			changed = nil
			next = min(next, time.Until(o.nextRead()))
		}
		if o.e.hasFailedNeighbors() {
			// The kernel does not tell of all that become reachable again.
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
			o.p.o.Log.Warn("listening for changes of the kernel ended and begins anew", "error", o.watch.Err)
			o.unsubscribe()
			if !pause(ctx, o.pause, reconfigured) {
				return nil
			}
			o.pause = min(2*o.pause, maxPause)
		}
	}
}

// deadlines are when drains, pauses between repairs, and holds end.
func (o *reconciler) deadlines() (list []time.Time) {
	for _, next := range []func() (time.Time, bool){o.e.nextDrain, o.e.nextRepair, o.e.expireHolds} {
		if at, ok := next(); ok {
			list = append(list, at)
		}
	}
	return list
}

// pause pauses, but not for something new. It tells whether to go on.
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

// handleEvents takes what was reported. Our own transactions are reported as well: the
// generation tells.
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

// step does one pass and publishes what is known then. It tells whether something is
// to be tried again.
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
		// Readiness must not wait for a repair that takes long.
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
		log.Warn("changes of the kernel cannot be listened for", "error", listenErr)
	}
	o.publish(desired, err)
	if e.readErr == nil {
		o.signalReady()
	}
	return err != nil || listenErr != nil || e.failing()
}

// solicitFailed has the neighbours of targets asked that failed. Why it cannot be done is said
// once: they come back by their checks at least.
func (o *reconciler) solicitFailed() {
	deaf := ""
	if err := o.solicit(o.e.failedTargets()); err != nil {
		deaf = err.Error()
	}
	if deaf != "" && deaf != o.solicitErr {
		o.p.o.Log.Warn("neighbours that failed cannot be asked again", "error", deaf)
	}
	o.solicitErr = deaf
}

// nextRead is when the next look that was asked for may happen.
func (o *reconciler) nextRead() time.Time {
	at := o.lastRead.Add(o.readInterval())
	if back := o.lastLinkDown.Add(linkSettleTime); back.After(at) {
		return back
	}
	return at
}

// readInterval is the time between two looks, so that a process that writes all the time does
// not keep the engine busy. What may be about a neighbour or a link waits less.
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

// load finds what is installed.
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

// publish tells what is known, if it is news.
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
			o.p.o.Log.Error("data plane cannot be read or changed", "error", err, "failures", s.Failures)
		}
	} else if old.Err != nil {
		o.p.o.Log.Info("data plane can be changed again", "failures", old.Failures)
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
			o.p.o.Log.Error("the data plane has a problem", "object", p.Object, "detail", p.Detail, "remedy", p.Remedy)
		}
	}
	for _, p := range old {
		if !slices.ContainsFunc(now, func(q Problem) bool { return p.Object == q.Object && p.Detail == q.Detail }) {
			o.p.o.Log.Info("a problem of the data plane is over", "object", p.Object, "detail", p.Detail)
		}
	}
}

// sameState compares all but the time.
func sameState(a, b State) bool {
	errText := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	return a.Revision == b.Revision && a.Withheld == b.Withheld && a.Failures == b.Failures && errText(a.Err) == errText(b.Err) &&
		maps.EqualFunc(a.Streams, b.Streams, func(x, y *StreamState) bool { return x == y || reflect.DeepEqual(x, y) }) &&
		maps.Equal(a.VIPs, b.VIPs) && maps.Equal(a.Held, b.Held) && a.Repairs == b.Repairs && maps.Equal(a.Unreachable, b.Unreachable) &&
		slices.Equal(a.Drift, b.Drift) && reflect.DeepEqual(a.Problems, b.Problems)
}

// reconcile reads everything and repairs it without back-off, except what is held.
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

// updateSysctls reads the kernel parameters again when it is time, or when the kernel
// reported a change.
func (o *reconciler) updateSysctls(now time.Time) {
	if o.checkSysctl == nil || now.Sub(o.sysctlsChecked) < sysctlInterval {
		return
	}
	o.sysctlsChecked = now
	o.sysctlProblems = o.checkSysctl()
}
