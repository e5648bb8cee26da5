package kernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// Pause between two passes that notifications ask for: somebody who changes rules all the time
	// must not keep us busy.
	minPause = 20 * time.Millisecond
	// Pause after a failed pass; it doubles up to maxPause. New VIPs do not wait for it.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// blindness is how long VIPs that were read back stay confirmed while the kernel cannot be
	// read, if nothing says that they were lost.
	blindness = 10 * time.Second
)

// Confirmed says for which VIPs the kernel was seen to route by source.
type Confirmed struct {
	// VIPs is never changed after it was published.
	VIPs vip.Set
	// Err says why configured VIPs are missing, or what else could not be done; nil when everything
	// stands.
	Err error
	// Family is what of Err concerns the VIPs of a family.
	Family [len(vip.Families)]error
	// Failures counts the failed passes since the last good one.
	Failures int
	// Repairs counts the passes that had to mend what somebody else changed.
	Repairs int
	// Removed counts the times that other processes removed routes of BIRD from the gateways'
	// table. BIRD does not notice before its next scan.
	Removed int
	// At is when this became so.
	At time.Time
}

// Routing keeps the source routing of the configured VIPs in the kernel. It is a task.Task.
type Routing struct {
	o         Options
	log       *slog.Logger
	wanted    latest.Value[*vip.Set]
	confirmed latest.Value[Confirmed]
	ready     chan struct{}
	// listen is newWatch; a test makes it deaf.
	listen func(Options) (*watch, error)
}

// New returns a Routing that does nothing before Run.
func New(o Options) *Routing {
	return &Routing{o: o.withDefaults(), log: o.withDefaults().Log.With("component", "kernel"), ready: make(chan struct{}), listen: newWatch}
}

// Configure sets the VIPs whose source routing must stand. It never blocks; the newest call wins.
// Before the first one the sets of an earlier run stay as they are, since an in-place restart must
// not leak.
//
// A VIP that is left out loses its source routing at once: withdraw it first.
func (r *Routing) Configure(vips []vip.VIP) {
	s := vip.NewSet(vips...)
	r.wanted.Set(&s)
}

// Confirmed returns for which of the configured VIPs the source routing was read back. It is
// updated when that, or the error, changes.
func (r *Routing) Confirmed() *latest.Value[Confirmed] { return &r.confirmed }

// Ready is closed once the parts that do not depend on VIPs stand: blackholes, rules, chains. BIRD
// must not start earlier. A family that the kernel does not have is not waited for.
func (r *Routing) Ready() <-chan struct{} { return r.ready }

// String implements task.Task.
func (r *Routing) String() string { return "kernel" }

// Run works until ctx ends; what is in the kernel then stays. It works in the network namespace of
// the calling thread. It fails only for invalid options: everything else is tried again.
func (r *Routing) Run(ctx context.Context) error {
	if err := r.o.Validate(); err != nil {
		return fmt.Errorf("source routing: %w", err)
	}
	p, err := newReconciler(r.o, r.log)
	if err != nil {
		return err
	}
	for _, problem := range reversePathProblems() {
		r.log.Warn(problem)
	}
	var w *watch
	defer func() {
		if w != nil {
			r.logFailure("close listeners", w.Close())
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	pause := failurePause
	for {
		var watchErr error
		if w == nil {
			// Listen first, so that no change falls between the look and the listening.
			w, watchErr = r.listen(r.o)
		}
		wanted, reconfigured := r.wanted.Get()
		removed := w != nil && w.removed.Swap(0) > 0
		result := p.run(wanted)
		result.removed = removed
		result.err = errors.Join(result.err, watchErr)
		r.publish(result)
		more, tidyErr := p.tidy()
		if tidyErr != nil {
			r.log.Warn("leftovers of an earlier frontend could not be removed", "error", tidyErr)
		}

		next := r.o.CheckInterval
		switch {
		case result.err != nil || tidyErr != nil:
			next, pause = min(pause, r.o.CheckInterval), min(2*pause, maxPause)
		case more:
			next = 0
		default:
			pause = failurePause
		}
		timer.Reset(next)
		var changed, failed <-chan struct{}
		if w != nil {
			changed, failed = w.changed, w.Failed()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-reconfigured:
		case <-timer.C:
		case <-failed:
			r.log.Warn("listening for kernel changes ended, beginning anew", "error", w.Err())
			r.logFailure("close listeners", w.Close())
			w = nil
			changed = nil
			if !r.rest(ctx, pause, reconfigured) {
				return nil
			}
			pause = min(2*pause, maxPause)
		case <-changed:
			if !r.rest(ctx, minPause, reconfigured) {
				return nil
			}
		}
	}
}

// rest pauses, but not for new VIPs. It tells whether to go on.
func (r *Routing) rest(ctx context.Context, pause time.Duration, reconfigured <-chan struct{}) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-reconfigured:
	case <-t.C:
	}
	return true
}

func (r *Routing) logFailure(what string, err error) {
	if err != nil {
		r.log.Warn("source routing: "+what+" failed", "error", err)
	}
}

func (r *Routing) publish(x result) {
	old := r.confirmed.Load()
	if x.base {
		select {
		case <-r.ready:
		default:
			close(r.ready)
			r.log.Info("source routing stands", "table_id", r.o.TableID, "priority", r.o.Priority, "mark", fmt.Sprintf("%#x/%#x", r.o.Mark, r.o.Mask))
		}
	}
	c := Confirmed{VIPs: x.vips, Err: x.err, Family: x.family, Failures: old.Failures, Repairs: old.Repairs, Removed: old.Removed, At: time.Now()}
	if x.removed {
		c.Removed++
	}
	if x.repaired {
		c.Repairs++
		r.log.Warn("source routing was changed by somebody else and is mended", "repairs", c.Repairs)
	}
	if x.err == nil {
		c.Failures = 0
	} else {
		c.Failures++
		if old.Err == nil || old.Err.Error() != x.err.Error() {
			r.log.Error("source routing does not stand", "error", x.err, "failures", c.Failures)
		}
	}
	if x.err == nil && old.Err != nil {
		r.log.Info("source routing stands again", "failures", old.Failures)
	}
	if old.At.IsZero() || c.Failures != old.Failures || c.Repairs != old.Repairs || c.Removed != old.Removed || !c.VIPs.Equal(old.VIPs) {
		if c.VIPs.Equal(old.VIPs) && old.VIPs != nil {
			c.VIPs = old.VIPs
		}
		r.confirmed.Set(c)
	}
}

// reconciler is what one look at the kernel, with its repairs, knows of the last one.
type reconciler struct {
	policy policy
	table  *table
	// ensurePolicy is policy.ensure, and now time.Now; tests replace them.
	ensurePolicy func(vip.Family) (changed bool, err error)
	now          func() time.Time

	// settled: the last pass left everything as wanted, so that a change now is somebody else's.
	settled bool
	// tidied: leftovers were removed since the VIPs last changed.
	tidied bool
	// What the last pass confirmed, from what it wanted and saw, and when the sets could last be
	// read.
	vips     vip.Set
	wanted   *vip.Set
	seen     *content
	stands   [len(vip.Families)]bool
	readable time.Time
	// forwarded families were seen to be forwarded.
	forwarded [len(vip.Families)]bool
}

func newReconciler(o Options, log *slog.Logger) (*reconciler, error) {
	t, err := newTable(o, log)
	if err != nil {
		return nil, err
	}
	p := policy{o: o, log: log}
	return &reconciler{policy: p, table: t, ensurePolicy: p.ensure, now: time.Now}, nil
}

type result struct {
	// base: all that does not depend on VIPs stands.
	base     bool
	vips     vip.Set
	repaired bool
	removed  bool
	err      error
	family   [len(vip.Families)]error
}

// run makes the kernel be as wanted, as far as it can, and tells how it is. wanted is nil before
// the first Configure.
func (p *reconciler) run(wanted *vip.Set) result {
	sameWish := wanted == p.wanted
	p.tidied = p.tidied && sameWish

	var family [len(vip.Families)]error
	var stands [len(vip.Families)]bool
	base, changed := true, false
	for _, f := range vip.Families {
		did, err := p.ensurePolicy(f)
		base = base && (err == nil || rtnetlink.FamilyAbsent(err))
		changed = changed || did
		if err == nil && hasFamily(wanted, f) {
			err = p.checkSysctls(f)
		}
		stands[f] = err == nil
		switch {
		case rtnetlink.FamilyAbsent(err) && !hasFamily(wanted, f):
		case rtnetlink.FamilyAbsent(err):
			family[f] = fmt.Errorf("this kernel has no %s, but VIPs of it are configured: %w", f, err)
		default:
			family[f] = err
		}
	}
	did, blind, tableErr := p.table.ensure(wanted)
	changed = changed || did

	x := result{repaired: changed && p.settled && sameWish, vips: p.vips}
	seen := p.table.seen
	x.base = base && seen != nil && !blind
	if !blind {
		p.readable = p.now()
	}
	switch {
	case blind && p.now().Sub(p.readable) < blindness:
		// Nothing says that what was read back is gone.
		x.vips = choose(wanted, func(v vip.VIP) bool { return stands[v.Family()] && p.vips.Has(v) })
	case blind || seen == nil:
		x.vips = vip.Set{}
	case !sameWish || seen != p.seen || stands != p.stands || p.vips == nil:
		x.vips = choose(wanted, func(v vip.VIP) bool {
			return stands[v.Family()] && seen.covered[v.Family()].covers(spanOf(v.Prefix()))
		})
	}
	if blind {
		seen = nil
	}
	p.vips, p.wanted, p.seen, p.stands = x.vips, wanted, seen, stands

	x.err = errors.Join(family[vip.IPv4], family[vip.IPv6], tableErr)
	for _, f := range vip.Families {
		x.family[f] = errors.Join(family[f], tableErr)
	}
	p.settled = x.err == nil
	return x
}

// tidy removes what a former frontend left, but only once nothing depends on it any more. It tells
// whether it wants to be called again at once.
func (p *reconciler) tidy() (more bool, err error) {
	if p.tidied || !p.settled || p.wanted == nil || len(p.vips) != len(*p.wanted) {
		return false, nil
	}
	for _, f := range vip.Families {
		if !p.stands[f] {
			continue
		}
		again, err := p.policy.removeLeftovers(f)
		if err != nil {
			return false, err
		}
		more = more || again
	}
	p.tidied = !more
	return more, nil
}

// choose returns the wanted VIPs for which ok holds, in a set of its own.
func choose(wanted *vip.Set, ok func(vip.VIP) bool) vip.Set {
	chosen := vip.Set{}
	if wanted == nil {
		return chosen
	}
	for v := range *wanted {
		if ok(v) {
			chosen[v] = struct{}{}
		}
	}
	return chosen
}

func hasFamily(s *vip.Set, f vip.Family) bool {
	if s == nil {
		return false
	}
	for v := range *s {
		if v.Family() == f {
			return true
		}
	}
	return false
}

// Cleanup removes all that is ours from the network namespace of the calling thread: the marks
// first, then rules, then blackholes. What is not there is no error.
func Cleanup(ctx context.Context, o Options) error {
	o = o.withDefaults()
	if err := o.Validate(); err != nil {
		return fmt.Errorf("clean up source routing: %w", err)
	}
	t, err := newTable(o, o.Log)
	if err != nil {
		return err
	}
	errs := []error{t.remove()}
	for _, f := range vip.Families {
		if ctx.Err() != nil {
			return errors.Join(append(errs, ctx.Err())...)
		}
		if err := (policy{o: o, log: o.Log}).remove(f); err != nil && !rtnetlink.FamilyAbsent(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
