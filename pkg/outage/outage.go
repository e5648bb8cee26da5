package outage

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
)

// minAddresses is how many addresses must have been ready before a mass failure is
// more likely an outage of their network than the end of each target.
const minAddresses = 10

// Options say what an outage of the target network is and what follows from it.
type Options struct {
	// Threshold is the percentage of all targets that must be exceeded; off by default.
	Threshold Percent
	// Hold lets failed targets count as ready during an outage. Otherwise only the
	// reason of their VIPs changes.
	Hold bool
}

// Verdict is what follows for readiness from [Detector.Evaluate].
type Verdict struct {
	// Outage reports whether an outage is suspected; Detail says why.
	Outage bool
	Detail string
	// Touched are the keys for which Held or Suspected may answer differently than
	// before, in no order.
	Touched []healthcheck.Key
	// Next is when Evaluate must be called again at the latest, even without a change;
	// zero: not before a change.
	Next time.Time
}

// Detector suspects the network instead of the targets when most targets fail
// at once. It is a pure function of check results: no clock, no goroutine, no I/O. It
// is for one caller.
//
// A failure is the step of a target from Ready to NotReady with [Health.Silent]: a
// target that refuses connections is reachable. When more than the threshold of all
// targets, 10 addresses at least, failed within one check interval (interval + timeout
// of each target's own check), an outage is suspected. It ends when any of its targets
// answers, rightly or wrongly. Targets that never were ready, are drained or removed
// are not counted.
//
// With Hold a failed target counts as ready
//   - for one check interval after its failure, since the threshold may yet be
//     exceeded: the checks of targets that fail together end at different times.
//   - during the outage, without limit.
//   - after the outage for one check interval; if a check succeeds in that time, for
//     rise intervals. Otherwise the end of each outage would withdraw every VIP.
type Detector struct {
	o Options
	// seen are the targets that have been ready since they are known; true: is ready.
	seen   map[healthcheck.Key]bool
	failed map[healthcheck.Key]*failure
	// counts of failed, by phase.
	pending, suspected int
	// next is not later than the first end in failed; zero: there is none.
	next    time.Time
	touched map[healthcheck.Key]struct{}
}

type failurePhase uint8

const (
	// failurePending: within one check interval.
	failurePending failurePhase = iota
	// failureSuspected: part of an outage.
	failureSuspected
	// failureRecovering: the outage is over, the next check decides.
	failureRecovering
)

// outageFailure is a silent failure that may be, is or was part of an outage.
type failure struct {
	phase failurePhase
	// end is when a pending or recovering failure counts like any other.
	end time.Time
	// rising: a check succeeded since.
	rising bool
}

// New returns a detector that knows no targets.
func New(o Options) *Detector {
	return &Detector{
		o: o, seen: map[healthcheck.Key]bool{}, failed: map[healthcheck.Key]*failure{},
		touched: map[healthcheck.Key]struct{}{},
	}
}

// Held reports whether a target that is not ready counts as ready.
func (d *Detector) Held(k healthcheck.Key) bool { return d.o.Hold && d.failed[k] != nil }

// Suspected reports whether the failure of a target is part of a suspected outage.
func (d *Detector) Suspected(k healthcheck.Key) bool {
	f := d.failed[k]
	return f != nil && f.phase == failureSuspected
}

// Evaluate takes over check results at now, which never goes back. check returns the
// check of a target; the zero Check, for one that is no longer configured, holds
// nothing. Each target must be passed again when its Silent changes, too: otherwise an
// answer goes unnoticed until the target is ready. The cost follows the changes.
func (d *Detector) Evaluate(now time.Time, changed []healthcheck.Health, removed []healthcheck.Key,
	check func(healthcheck.Key) trench.Check,
) Verdict {
	if d.o.Threshold == 0 {
		return Verdict{}
	}
	for _, k := range removed {
		delete(d.seen, k)
		d.drop(k)
	}
	over := false
	for _, h := range changed {
		over = d.take(now, h, check(h.Key)) || over
	}
	switch {
	case over:
		for k, f := range d.failed {
			if f.phase == failureSuspected {
				d.recover(now, k, f, checkInterval(check(k)))
			}
		}
	case d.suspected > 0 && d.pending > 0, d.o.Threshold.exceeded(d.pending, len(d.seen)) && d.addresses() >= minAddresses:
		for k, f := range d.failed {
			if f.phase == failurePending {
				d.enter(k, f, failureSuspected)
			}
		}
	}
	d.expire(now)
	v := Verdict{Outage: d.suspected > 0, Next: d.next}
	if v.Outage {
		v.Detail = fmt.Sprintf("%d of %d targets failed within one check interval, and none of them answers", d.suspected,
			len(d.seen))
	}
	for k := range d.touched {
		v.Touched = append(v.Touched, k)
	}
	clear(d.touched)
	return v
}

// checkInterval is within how much time failures of targets with such a check are one
// event.
func checkInterval(c trench.Check) time.Duration { return c.Interval + c.Timeout }

// addresses counts the addresses of all targets: many streams may share one host.
func (d *Detector) addresses() int {
	distinct := map[netip.Addr]struct{}{}
	for k := range d.seen {
		distinct[k.Addr] = struct{}{}
	}
	return len(distinct)
}

// take takes over one result, and reports whether it ends the outage: a target of the
// outage answered.
func (d *Detector) take(now time.Time, h healthcheck.Health, check trench.Check) (over bool) {
	wasReady, known := d.seen[h.Key]
	switch {
	case h.State == healthcheck.Ready:
		d.seen[h.Key] = true
	case h.State != healthcheck.NotReady && h.State != healthcheck.Overdue:
		delete(d.seen, h.Key)
	case known:
		d.seen[h.Key] = false
	}
	f := d.failed[h.Key]
	if f == nil {
		if end := h.Since.Add(checkInterval(check)); wasReady && h.State == healthcheck.NotReady && h.Silent &&
			end.After(now) {
			d.failed[h.Key] = &failure{}
			d.pending++
			d.wait(d.failed[h.Key], end)
			d.touched[h.Key] = struct{}{}
		}
		return false
	}
	over = f.phase == failureSuspected && !h.Silent && (h.State == healthcheck.Ready || h.State == healthcheck.NotReady)
	switch {
	case h.State == healthcheck.NotReady && h.Silent && f.phase != failureRecovering:
		// It failed once more.
	case h.State == healthcheck.NotReady && !h.Silent && h.LastError == "" && f.phase != failurePending:
		if !f.rising {
			f.rising = true
			d.recover(now, h.Key, f, time.Duration(max(1, check.Rise))*checkInterval(check))
		}
	default:
		d.drop(h.Key)
	}
	return over
}

// enter moves a failure to another phase.
func (d *Detector) enter(k healthcheck.Key, f *failure, phase failurePhase) {
	d.count(f.phase, -1)
	f.phase = phase
	d.count(phase, 1)
	d.touched[k] = struct{}{}
}

func (d *Detector) count(phase failurePhase, n int) {
	switch phase {
	case failurePending:
		d.pending += n
	case failureSuspected:
		d.suspected += n
	case failureRecovering:
	}
}

// recover lets the next checks of a target decide.
func (d *Detector) recover(now time.Time, k healthcheck.Key, f *failure, within time.Duration) {
	d.enter(k, f, failureRecovering)
	d.wait(f, now.Add(within))
}

func (d *Detector) wait(f *failure, end time.Time) {
	f.end = end
	if d.next.IsZero() || end.Before(d.next) {
		d.next = end
	}
}

// drop lets a target be what its checks say.
func (d *Detector) drop(k healthcheck.Key) {
	if f := d.failed[k]; f != nil {
		d.enter(k, f, failureRecovering)
		delete(d.failed, k)
	}
}

// expire drops what has waited long enough.
func (d *Detector) expire(now time.Time) {
	if d.next.IsZero() || now.Before(d.next) {
		return
	}
	d.next = time.Time{}
	for k, f := range d.failed {
		switch {
		case f.phase == failureSuspected:
		case !f.end.After(now):
			d.drop(k)
		default:
			d.wait(f, f.end)
		}
	}
}
