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
	// minPause separates reconciliations after notifications: a process may change rules continuously.
	minPause = 20 * time.Millisecond
	// failurePause and maxPause bound the back-off after a failure to reconcile. New VIPs do not wait.
	failurePause = 50 * time.Millisecond
	maxPause     = 5 * time.Second
	// lookInterval is the time between two lookups of the paths of packets from VIPs. lookAgain is
	// the delay of the second lookup, which confirms a problem.
	lookInterval = time.Second
	lookAgain    = 50 * time.Millisecond
	// unreadableLimit is how long VIPs stay confirmed while the kernel's tables cannot be read.
	unreadableLimit = 10 * time.Second
)

// Confirmed is the source routing that was observed in the kernel.
type Confirmed struct {
	// VIPs is the set of VIPs with source routing that is not being removed. It is immutable.
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
func New(options Options) *Routing {
	options = options.withDefaults()
	options.Log = options.Log.With("component", "kernel")
	return &Routing{o: options, ready: make(chan struct{}), listen: newWatch}
}

// Configure sets the desired VIPs. It never blocks; the newest call wins. Before the first call
// the sets of an earlier run stay unchanged, so that no packet leaks during an in-place restart.
//
// A VIP that is absent from vips loses its source routing immediately: withdraw it first.
func (routing *Routing) Configure(vips []vip.VIP) { routing.ConfigureSet(vip.NewSet(vips...)) }

// ConfigureSet is Configure with a set, which must not be modified afterwards.
func (routing *Routing) ConfigureSet(vips vip.Set) { routing.desired.Set(&vips) }

// Confirmed returns the configured VIPs whose source routing was read back from the kernel. It is
// updated when the set or the error changes.
func (routing *Routing) Confirmed() *latest.Value[Confirmed] { return &routing.confirmed }

// Ready is closed once the state that does not depend on VIPs is installed: blackhole routes, rules
// and chains. BIRD must not start earlier. A family that the kernel does not support is ignored.
func (routing *Routing) Ready() <-chan struct{} { return routing.ready }

// String implements task.Task.
func (routing *Routing) String() string { return "kernel" }

// Overdue implements task.Loop.
func (routing *Routing) Overdue() time.Duration { return routing.pulse.Overdue() }

// Run reconciles until ctx ends, in the network namespace of the calling thread. The state stays in
// the kernel after Run returns. Run fails only for invalid options and retries after other errors.
func (routing *Routing) Run(ctx context.Context) error {
	if routing.o.Foreign {
		return routing.trust(ctx)
	}
	if err := routing.o.Validate(); err != nil {
		return fmt.Errorf("source routing: %w", err)
	}
	reconciler := newReconciler(routing.o)
	for _, problem := range reversePathProblems() {
		routing.o.Log.Warn(problem)
	}
	var watch *watch
	defer func() {
		watch.close(routing.o.Log)
		if err := reconciler.paths.close(); err != nil {
			routing.o.Log.Warn("failed to close netlink sockets", "error", err)
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	failures := backoff.Backoff{Min: failurePause, Max: maxPause}
	defer routing.pulse.End()
reconciliations:
	for {
		routing.pulse.Next(0)
		var watchErr error
		if watch == nil {
			// Subscribe before reading the kernel's state, so that no change is missed in between.
			watch, watchErr = routing.listen(routing.o)
		}
		desired, reconfigured := routing.desired.Get()
		// Reset the counter before the reconciliation: removals during it belong to the next one.
		removed := watch != nil && watch.removed.Swap(0) > 0
		if desired != reconciler.desired {
			routing.retract(*desired)
		}
		result := reconciler.reconcile(desired)
		result.err = errors.Join(result.err, watchErr)
		// Publish before the removal of leftovers, for which confirmed VIPs must not wait.
		routing.publish(result, removed)
		more, cleanErr := reconciler.removeLeftovers()
		if cleanErr != nil {
			routing.o.Log.Warn("failed to remove leftovers of an earlier frontend", "error", cleanErr)
		}

		next := tick.Until(time.Now(), routing.o.checkInterval)
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
		// The timer fires more often than reconciliations are due, to look up the paths.
		wait := func() {
			pause := min(time.Until(due), tick.Until(time.Now(), lookInterval))
			timer.Reset(pause)
			routing.pulse.Next(pause)
		}
		wait()
		var changed, failed <-chan struct{}
		if watch != nil {
			changed, failed = watch.changed, watch.Failed()
		}
		var pause time.Duration
		for pause == 0 {
			select {
			case <-ctx.Done():
				return nil
			case <-reconfigured:
				continue reconciliations
			case <-timer.C:
				if !time.Now().Before(due) || reconciler.pathsChanged() {
					continue reconciliations
				}
				wait()
			case <-failed:
				routing.o.Log.Warn("netlink subscription failed, resubscribing", "error", watch.Err())
				watch.close(routing.o.Log)
				// The next iteration subscribes first and then reads the state.
				watch = nil
				pause = failures.Next()
			case <-changed:
				pause = minPause
			}
		}
		// Wait for the end of a burst of notifications, or for the next attempt to subscribe.
		timer.Reset(pause)
		routing.pulse.Next(pause)
		select {
		case <-ctx.Done():
			return nil
		case <-reconfigured:
		case <-timer.C:
		}
	}
}

// trust confirms every configured VIP until ctx ends.
func (routing *Routing) trust(ctx context.Context) error {
	close(routing.ready)
	for {
		desired, changed := routing.desired.Get()
		if desired != nil {
			routing.confirmed.Set(Confirmed{VIPs: *desired, At: time.Now()})
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// retract revokes the confirmation of VIPs before a reconciliation removes them: one that is
// configured again meanwhile must not be announced for what was in the kernel before.
func (routing *Routing) retract(desired vip.Set) {
	confirmed := routing.confirmed.Load()
	kept := maps.Clone(confirmed.VIPs)
	maps.DeleteFunc(kept, func(v vip.VIP, _ struct{}) bool { return !desired.Has(v) })
	if len(kept) < len(confirmed.VIPs) {
		confirmed.VIPs, confirmed.At = kept, time.Now()
		routing.confirmed.Set(confirmed)
	}
}

func (routing *Routing) publish(result result, removed bool) {
	old := routing.confirmed.Load()
	if result.base && !routing.installed {
		routing.installed = true
		close(routing.ready)
		routing.o.Log.Info("source routing installed", "table_id", routing.o.TableID, "priority", routing.o.Priority,
			"mark", fmt.Sprintf("%#x/%#x", routing.o.Mark, routing.o.Mask))
	}
	confirmed := old
	confirmed.VIPs, confirmed.Err, confirmed.Family, confirmed.At = result.vips, result.err, result.family, time.Now()
	if removed {
		confirmed.Removed++
	}
	if result.repaired {
		confirmed.Repairs++
		routing.o.Log.Warn("drift detected and repaired: another process changed source routing", "repairs",
			confirmed.Repairs)
	}
	switch {
	case result.err == nil && old.Err != nil:
		confirmed.Failures = 0
		routing.o.Log.Info("source routing restored", "failures", old.Failures)
	case result.err != nil:
		confirmed.Failures++
		if old.Err == nil || old.Err.Error() != result.err.Error() {
			routing.o.Log.Error("source routing is incomplete", "error", result.err, "failures", confirmed.Failures)
		}
	}
	if old.At.IsZero() || confirmed.Failures != old.Failures || confirmed.Repairs != old.Repairs ||
		confirmed.Removed != old.Removed ||
		!confirmed.VIPs.Equal(old.VIPs) {
		routing.confirmed.Set(confirmed)
	}
}

// reconciler brings the kernel to the desired state and keeps the last reconciliation's result.
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

func newReconciler(options Options) *reconciler {
	policy := policy{options}
	return &reconciler{
		policy: policy, table: newTable(options), ensurePolicy: policy.ensure, now: time.Now,
		paths: paths{policy: policy},
	}
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

// reconcile installs the desired state, nil before Configure, and returns the observed state.
func (reconciler *reconciler) reconcile(desired *vip.Set) result {
	sameDesired := desired == reconciler.desired
	if !sameDesired {
		reconciler.cleaned, reconciler.needed = false, [len(vip.Families)]bool{}
		for address := range *desired {
			reconciler.needed[address.Family()] = true
		}
		reconciler.paths.configure(*desired)
	}
	var result result
	var installed [len(vip.Families)]bool
	base, changed := true, false
	pathErr := reconciler.paths.findInputs()
	for _, family := range vip.Families {
		modified, err := reconciler.ensurePolicy(family)
		absent := rtnetlink.FamilyAbsent(err)
		changed = changed || modified
		base = base && (err == nil || absent)
		if err == nil && reconciler.needed[family] {
			err = reconciler.checkSysctls(family)
		}
		if err == nil && reconciler.judgesPaths {
			var unconfirmed bool
			err, unconfirmed = reconciler.paths.check(family)
			result.unconfirmed = result.unconfirmed || unconfirmed
		}
		// A VIP needs its family only, so that a fault of one family leaves the other advertised.
		installed[family] = err == nil
		switch {
		case absent && reconciler.needed[family]:
			result.family[family] = fmt.Errorf("this kernel has no %s, but VIPs of it are configured: %w", family, err)
		case !absent:
			result.family[family] = err
		}
	}
	// Rules precede marks: a marked packet without a rule would leave by the main table.
	modified, unreadable, tableErr := reconciler.table.ensure(desired)
	changed = changed || modified

	result.repaired, result.vips = changed && reconciler.settled && sameDesired, reconciler.vips
	observed := reconciler.table.observed
	if unreadable {
		observed = nil
	} else {
		reconciler.readable = reconciler.now()
	}
	result.base = base && observed != nil
	switch {
	case unreadable && reconciler.now().Sub(reconciler.readable) < unreadableLimit:
		// A failed read does not prove that confirmed VIPs were removed.
		result.vips = filterVIPs(desired, func(address vip.VIP) bool {
			return installed[address.Family()] && reconciler.vips.Has(address)
		})
	case observed == nil:
		result.vips = vip.Set{}
	case !sameDesired || observed != reconciler.observed || installed != reconciler.installed || reconciler.vips == nil:
		result.vips = filterVIPs(desired, func(address vip.VIP) bool {
			return installed[address.Family()] && covered(observed[address.Family()], nft.RangeOf(address.Prefix()))
		})
	}
	reconciler.vips, reconciler.desired, reconciler.observed, reconciler.installed = result.vips, desired, observed,
		installed

	result.err = errors.Join(result.family[vip.IPv4], result.family[vip.IPv6], tableErr, pathErr)
	for _, family := range vip.Families {
		result.family[family] = errors.Join(result.family[family], tableErr)
	}
	// A change after a failed reconciliation may be its completion, not drift.
	reconciler.settled = result.err == nil
	return result
}

// removeLeftovers removes a former frontend's rules and routes once all desired VIPs are confirmed.
func (reconciler *reconciler) removeLeftovers() (more bool, err error) {
	if reconciler.cleaned || !reconciler.settled || reconciler.desired == nil ||
		len(reconciler.vips) != len(*reconciler.desired) {
		return false, nil
	}
	for _, family := range vip.Families {
		if reconciler.installed[family] {
			again, err := reconciler.policy.remove(family, false)
			if err != nil {
				return false, err
			}
			more = more || again
		}
	}
	reconciler.cleaned, reconciler.judgesPaths = !more, reconciler.judgesPaths || !more
	return more, nil
}

// pathsChanged reports whether the path problem of a family differs from the last lookup.
func (reconciler *reconciler) pathsChanged() (changed bool) {
	for _, family := range vip.Families {
		changed = reconciler.judgesPaths && reconciler.needed[family] && reconciler.paths.look(family) || changed
	}
	return changed
}

// filterVIPs returns the desired VIPs for which ok returns true. It returns the desired set
// itself if that holds for all VIPs, so the result must not be modified.
func filterVIPs(desired *vip.Set, found func(vip.VIP) bool) vip.Set {
	if desired == nil {
		return vip.Set{}
	}
	chosen := *desired
	for address := range *desired {
		if found(address) {
			continue
		}
		if len(chosen) == len(*desired) {
			chosen = maps.Clone(chosen)
		}
		delete(chosen, address)
	}
	return chosen
}

// Cleanup removes the state of this package from the network namespace of the calling thread: first
// the table that sets the marks, then rules, then blackhole routes. It ignores absent state.
func Cleanup(ctx context.Context, options Options) error {
	options = options.withDefaults()
	if err := options.Validate(); err != nil {
		return fmt.Errorf("failed to clean up source routing: %w", err)
	}
	errs := []error{removeTable()}
	for _, family := range vip.Families {
		if ctx.Err() != nil {
			return errors.Join(append(errs, ctx.Err())...)
		}
		if _, err := (policy{options}).remove(family, true); err != nil && !rtnetlink.FamilyAbsent(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
