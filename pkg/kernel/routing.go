package kernel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// minPause separates reconciliations that notifications trigger: another process may change
	// rules continuously.
	minPause = 20 * time.Millisecond
	// failurePause and maxPause bound the back-off after a failed reconciliation. New VIPs do not
	// wait for it.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// lookInterval is the time between two lookups of the paths of packets from VIPs. lookAgain is
	// the delay of the second lookup, which confirms a problem.
	lookInterval = time.Second
	lookAgain    = 50 * time.Millisecond
	// unreadableLimit is how long confirmed VIPs stay confirmed while the kernel's tables cannot be
	// read.
	unreadableLimit = 10 * time.Second
)

// Confirmed is the source routing that was observed in the kernel.
type Confirmed struct {
	// VIPs is the set of VIPs with source routing. It is immutable.
	VIPs vip.Set
	// Err is the error of the last reconciliation; nil when everything is installed.
	Err error
	// Family holds the part of Err that concerns the VIPs of each family.
	Family [len(vip.Families)]error
	// Failures counts the failed reconciliations since the last one that succeeded.
	Failures int
	// Repairs counts the reconciliations that reverted a change by another process.
	Repairs int
	// Removed counts the times that other processes removed routes of BIRD from the gateways' table.
	// BIRD detects such a removal only in its next scan.
	Removed int
	// At is the time of the change.
	At time.Time
}

// Routing keeps the source routing of the configured VIPs in the kernel. It is a task.Task.
type Routing struct {
	o         Options
	desired   latest.Value[*vip.Set]
	confirmed latest.Value[Confirmed]
	ready     chan struct{}
	installed bool // ready is closed
	pulse     task.Pulse
	// listen is newWatch; tests replace it.
	listen func(Options) (*watch, error)
}

// New returns a Routing that is idle until Run.
func New(o Options) *Routing {
	o = o.withDefaults()
	o.Log = o.Log.With("component", "kernel")
	return &Routing{o: o, ready: make(chan struct{}), listen: newWatch}
}

// Configure sets the desired VIPs. It never blocks; the newest call wins. Before the first call
// the sets of an earlier run stay unchanged, so that no packet leaks during an in-place restart.
//
// A VIP that is absent from vips loses its source routing immediately: withdraw it first.
func (r *Routing) Configure(vips []vip.VIP) { r.ConfigureSet(vip.NewSet(vips...)) }

// ConfigureSet is Configure with a set, which must not be modified afterwards.
func (r *Routing) ConfigureSet(vips vip.Set) { r.desired.Set(&vips) }

// Confirmed returns the configured VIPs whose source routing was read back from the kernel. It is
// updated when the set or the error changes.
func (r *Routing) Confirmed() *latest.Value[Confirmed] { return &r.confirmed }

// Ready is closed once the state that does not depend on VIPs is installed: blackhole routes,
// rules and chains. BIRD must not start earlier. A family that the kernel does not support is
// ignored.
func (r *Routing) Ready() <-chan struct{} { return r.ready }

// String implements task.Task.
func (r *Routing) String() string { return "kernel" }

// Overdue implements task.Loop.
func (r *Routing) Overdue() time.Duration { return r.pulse.Overdue() }

// Run reconciles until ctx ends, in the network namespace of the calling thread. The state stays
// in the kernel after Run returns. Run fails only for invalid options and retries after other
// errors.
func (r *Routing) Run(ctx context.Context) error {
	if err := r.o.Validate(); err != nil {
		return fmt.Errorf("source routing: %w", err)
	}
	p := newReconciler(r.o)
	for _, problem := range reversePathProblems() {
		r.o.Log.Warn(problem)
	}
	var w *watch
	defer func() {
		w.close(r.o.Log)
		if err := p.paths.close(); err != nil {
			r.o.Log.Warn("failed to close netlink sockets", "error", err)
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	failures := backoff.Backoff{Min: failurePause, Max: maxPause}
	defer r.pulse.End()
reconciliations:
	for {
		r.pulse.Next(0)
		var watchErr error
		if w == nil {
			// Subscribe before reading the kernel's state, so that no change is missed in between.
			w, watchErr = r.listen(r.o)
		}
		desired, reconfigured := r.desired.Get()
		removed := w != nil && w.removed.Swap(0) > 0
		result := p.reconcile(desired)
		result.err = errors.Join(result.err, watchErr)
		r.publish(result, removed)
		more, cleanErr := p.removeLeftovers()
		if cleanErr != nil {
			r.o.Log.Warn("failed to remove leftovers of an earlier frontend", "error", cleanErr)
		}

		next := tick.Until(time.Now(), r.o.checkInterval)
		switch {
		case result.unconfirmed:
			next = min(lookAgain, next)
		case result.err != nil || cleanErr != nil:
			next = min(failures.Next(), next)
		case more:
			next = 0
		default:
			failures.Reset()
		}
		due := time.Now().Add(next)
		wait := func() {
			pause := min(time.Until(due), tick.Until(time.Now(), lookInterval))
			timer.Reset(pause)
			r.pulse.Next(pause)
		}
		wait()
		var changed, failed <-chan struct{}
		if w != nil {
			changed, failed = w.changed, w.Failed()
		}
		var pause time.Duration
		for pause == 0 {
			select {
			case <-ctx.Done():
				return nil
			case <-reconfigured:
				continue reconciliations
			case <-timer.C:
				if !time.Now().Before(due) || p.pathsChanged() {
					continue reconciliations
				}
				wait()
			case <-failed:
				r.o.Log.Warn("netlink subscription failed, resubscribing", "error", w.Err())
				w.close(r.o.Log)
				w = nil
				pause = failures.Next()
			case <-changed:
				pause = minPause
			}
		}
		timer.Reset(pause)
		r.pulse.Next(pause)
		select {
		case <-ctx.Done():
			return nil
		case <-reconfigured:
		case <-timer.C:
		}
	}
}

func (r *Routing) publish(x result, removed bool) {
	old := r.confirmed.Load()
	if x.base && !r.installed {
		r.installed = true
		close(r.ready)
		r.o.Log.Info("source routing installed", "table_id", r.o.TableID, "priority", r.o.Priority,
			"mark", fmt.Sprintf("%#x/%#x", r.o.Mark, r.o.Mask))
	}
	c := old
	c.VIPs, c.Err, c.Family, c.At = x.vips, x.err, x.family, time.Now()
	if removed {
		c.Removed++
	}
	if x.repaired {
		c.Repairs++
		r.o.Log.Warn("drift detected and repaired: another process changed source routing", "repairs", c.Repairs)
	}
	switch {
	case x.err == nil && old.Err != nil:
		c.Failures = 0
		r.o.Log.Info("source routing restored", "failures", old.Failures)
	case x.err != nil:
		c.Failures++
		if old.Err == nil || old.Err.Error() != x.err.Error() {
			r.o.Log.Error("source routing is incomplete", "error", x.err, "failures", c.Failures)
		}
	}
	if old.At.IsZero() || c.Failures != old.Failures || c.Repairs != old.Repairs || c.Removed != old.Removed ||
		!c.VIPs.Equal(old.VIPs) {
		r.confirmed.Set(c)
	}
}

// reconciler brings the kernel to the desired state and keeps the result of the last
// reconciliation.
type reconciler struct {
	policy policy
	table  *table
	// ensurePolicy is policy.ensure, and now time.Now; tests replace them.
	ensurePolicy func(vip.Family) (changed bool, err error)
	now          func() time.Time

	settled bool // the last reconciliation succeeded, so that a difference is drift
	cleaned bool // leftovers were removed since the VIPs last changed
	// vips holds the VIPs that the last reconciliation confirmed. The next fields are its inputs:
	// desired and observed state.
	vips      vip.Set
	desired   *vip.Set
	needed    [len(vip.Families)]bool // families of desired
	observed  *content
	installed [len(vip.Families)]bool
	paths     paths
	// judgesPaths is set after leftovers were removed: before that, leftovers may divert packets.
	judgesPaths bool
	readable    time.Time               // last successful read of the sets
	forwarded   [len(vip.Families)]bool // forwarding was enabled at least once
}

func newReconciler(o Options) *reconciler {
	p := policy{o}
	return &reconciler{policy: p, table: newTable(o), ensurePolicy: p.ensure, now: time.Now, paths: paths{policy: p}}
}

type result struct {
	base     bool // everything that does not depend on VIPs is installed
	vips     vip.Set
	repaired bool
	err      error
	family   [len(vip.Families)]error
	// unconfirmed reports a path problem that a second lookup must confirm.
	unconfirmed bool
}

// reconcile installs the desired state, which is nil before Configure, and returns the observed
// state.
func (p *reconciler) reconcile(desired *vip.Set) result {
	sameDesired := desired == p.desired
	if !sameDesired {
		p.cleaned, p.needed = false, [len(vip.Families)]bool{}
		for v := range *desired {
			p.needed[v.Family()] = true
		}
		p.paths.configure(*desired)
	}
	var x result
	var installed [len(vip.Families)]bool
	base, changed := true, false
	pathErr := p.paths.findInputs()
	for _, f := range vip.Families {
		modified, err := p.ensurePolicy(f)
		absent := rtnetlink.FamilyAbsent(err)
		changed = changed || modified
		base = base && (err == nil || absent)
		if err == nil && p.needed[f] {
			err = p.checkSysctls(f)
		}
		if err == nil && p.judgesPaths {
			var unconfirmed bool
			err, unconfirmed = p.paths.check(f)
			x.unconfirmed = x.unconfirmed || unconfirmed
		}
		installed[f] = err == nil
		switch {
		case absent && p.needed[f]:
			x.family[f] = fmt.Errorf("this kernel has no %s, but VIPs of it are configured: %w", f, err)
		case !absent:
			x.family[f] = err
		}
	}
	modified, unreadable, tableErr := p.table.ensure(desired)
	changed = changed || modified

	x.repaired, x.vips = changed && p.settled && sameDesired, p.vips
	observed := p.table.observed
	if unreadable {
		observed = nil
	} else {
		p.readable = p.now()
	}
	x.base = base && observed != nil
	switch {
	case unreadable && p.now().Sub(p.readable) < unreadableLimit:
		// A failed read is no evidence that confirmed VIPs were removed.
		x.vips = filterVIPs(desired, func(v vip.VIP) bool { return installed[v.Family()] && p.vips.Has(v) })
	case observed == nil:
		x.vips = vip.Set{}
	case !sameDesired || observed != p.observed || installed != p.installed || p.vips == nil:
		x.vips = filterVIPs(desired, func(v vip.VIP) bool {
			return installed[v.Family()] && covered(observed[v.Family()], nft.RangeOf(v.Prefix()))
		})
	}
	p.vips, p.desired, p.observed, p.installed = x.vips, desired, observed, installed

	x.err = errors.Join(x.family[vip.IPv4], x.family[vip.IPv6], tableErr, pathErr)
	for _, f := range vip.Families {
		x.family[f] = errors.Join(x.family[f], tableErr)
	}
	p.settled = x.err == nil
	return x
}

// removeLeftovers removes rules and routes of a former frontend after all desired VIPs are
// confirmed.
func (p *reconciler) removeLeftovers() (more bool, err error) {
	if p.cleaned || !p.settled || p.desired == nil || len(p.vips) != len(*p.desired) {
		return false, nil
	}
	for _, f := range vip.Families {
		if p.installed[f] {
			again, err := p.policy.remove(f, false)
			if err != nil {
				return false, err
			}
			more = more || again
		}
	}
	p.cleaned, p.judgesPaths = !more, p.judgesPaths || !more
	return more, nil
}

// pathsChanged reports whether the path problem of a family differs from the last lookup.
func (p *reconciler) pathsChanged() (changed bool) {
	for _, f := range vip.Families {
		changed = p.judgesPaths && p.needed[f] && p.paths.look(f) || changed
	}
	return changed
}

// filterVIPs returns the desired VIPs for which ok returns true. It returns the desired set
// itself if that holds for all VIPs, so the result must not be modified.
func filterVIPs(desired *vip.Set, ok func(vip.VIP) bool) vip.Set {
	if desired == nil {
		return vip.Set{}
	}
	chosen := *desired
	for v := range *desired {
		if ok(v) {
			continue
		}
		if len(chosen) == len(*desired) {
			chosen = maps.Clone(chosen)
		}
		delete(chosen, v)
	}
	return chosen
}

// Cleanup removes the state of this package from the network namespace of the calling thread:
// first the table that sets the marks, then rules, then blackhole routes. It ignores absent
// state.
func Cleanup(ctx context.Context, o Options) error {
	o = o.withDefaults()
	if err := o.Validate(); err != nil {
		return fmt.Errorf("failed to clean up source routing: %w", err)
	}
	errs := []error{removeTable()}
	for _, f := range vip.Families {
		if ctx.Err() != nil {
			return errors.Join(append(errs, ctx.Err())...)
		}
		if _, err := (policy{o}).remove(f, true); err != nil && !rtnetlink.FamilyAbsent(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
