package outage

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
)

// minAddresses is the minimum number of target addresses for which a mass failure counts as an
// outage.
const minAddresses = 10

// Options configure a Detector.
type Options struct {
	// Threshold is the percentage of all targets that must fail; off by default.
	Threshold Percent
	// Hold keeps failed targets ready during an outage. Without it an outage changes only the reason
	// of their VIPs.
	Hold bool
}

// Percent is a share of all targets, from 1 to 100 %. The zero Percent is off.
type Percent uint8

// UnmarshalText parses text such as "80%". "" and "off" give the zero Percent.
func (p *Percent) UnmarshalText(text []byte) error {
	digits, percent := strings.CutSuffix(string(text), "%")
	n, err := strconv.ParseUint(digits, 10, 8)
	off := len(text) == 0 || string(text) == "off"
	if !off && (err != nil || !percent || n < 1 || n > 100) {
		return fmt.Errorf("%q is not a percentage of targets; use whole percent from 1%% to 100%%, or off", text)
	}
	*p = Percent(n) // 0 if off
	return nil
}

// String returns the text that UnmarshalText parses.
func (p Percent) String() string {
	if p == 0 {
		return "off"
	}
	return strconv.Itoa(int(p)) + "%"
}

// reached reports whether part is at least this percentage of whole.
func (p Percent) reached(part, whole int) bool { return p > 0 && part > 0 && part*100 >= int(p)*whole }

// Verdict is the result of [Detector.Evaluate].
type Verdict struct {
	// Outage reports whether an outage is suspected; Detail is the reason.
	Outage bool
	Detail string
	// Touched lists the keys whose Held or Suspected may have changed, in no order.
	Touched []healthcheck.Key
	// Next is the latest time of the next call of Evaluate; zero if only a change requires it.
	Next time.Time
}

// Detector detects outages. It is not safe for concurrent use.
//
// A failure is the change of a target from Ready to NotReady that is Silent: a target that
// refuses connections is reachable. When at least the threshold of all targets, of at least 10
// addresses, fail within one check interval (interval + timeout of each target's own check), an
// outage is suspected. It ends when any of its targets responds, even with a failed check.
// Targets that were never ready, are drained or removed are not counted.
//
// With Hold a failed target counts as ready
//   - for one check interval after its failure: checks of targets that fail together end at
//     different times, so the threshold may still be reached;
//   - during the outage, without limit;
//   - after the outage for one check interval or, if a check succeeds in that time, for rise check
//     intervals: otherwise the end of each outage would withdraw every VIP.
type Detector struct {
	o Options
	// seen maps each target that was ready at least once to whether it is ready.
	seen    map[healthcheck.Key]bool
	failed  map[healthcheck.Key]*failure
	count   [3]int    // number of failures, by phase
	next    time.Time // not later than the first end in failed; zero without an end
	touched map[healthcheck.Key]struct{}
}

type phase uint8

const (
	pending    phase = iota // within one check interval
	suspected               // part of an outage
	recovering              // the outage is over; the next check determines the state
)

// failure is a silent failure.
type failure struct {
	phase  phase
	end    time.Time // end of the pending or recovering phase
	rising bool      // a check succeeded after the outage
}

// New returns a detector without targets.
func New(o Options) *Detector {
	d := &Detector{o: o, seen: map[healthcheck.Key]bool{}, failed: map[healthcheck.Key]*failure{}}
	d.touched = map[healthcheck.Key]struct{}{}
	return d
}

// Held reports whether a target that is not ready counts as ready.
func (d *Detector) Held(k healthcheck.Key) bool { return d.o.Hold && d.failed[k] != nil }

// Suspected reports whether the failure of a target is part of a suspected outage.
func (d *Detector) Suspected(k healthcheck.Key) bool {
	f := d.failed[k]
	return f != nil && f.phase == suspected
}

// Evaluate applies check results at now, which must not decrease between calls. check returns a
// target's check, or the zero Check, which holds nothing, for a target that is not configured. A
// target must also be passed when only its Silent changes, since that change may be the response
// that ends an outage. The cost depends on the number of changes.
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
		over = d.apply(now, h, check(h.Key)) || over
	}
	switch {
	case over:
		for k, f := range d.failed {
			if f.phase == suspected {
				d.enter(k, f, recovering, now.Add(checkInterval(check(k))))
			}
		}
	case d.count[suspected] > 0 && d.count[pending] > 0,
		d.o.Threshold.reached(d.count[pending], len(d.seen)) && d.addresses() >= minAddresses:
		for k, f := range d.failed {
			if f.phase == pending {
				d.enter(k, f, suspected, time.Time{})
			}
		}
	}
	d.expire(now)
	v := Verdict{Outage: d.count[suspected] > 0, Next: d.next, Touched: slices.Collect(maps.Keys(d.touched))}
	if v.Outage {
		v.Detail = fmt.Sprintf("%d of %d targets failed within one check interval, and none of them answers",
			d.count[suspected], len(d.seen))
	}
	clear(d.touched)
	return v
}

// checkInterval returns the time within which failures of targets with check c belong together.
func checkInterval(c trench.Check) time.Duration { return c.Interval + c.Timeout }

// addresses counts the distinct addresses of all targets: many streams may share one host.
func (d *Detector) addresses() int {
	distinct := map[netip.Addr]struct{}{}
	for k := range d.seen {
		distinct[k.Addr] = struct{}{}
	}
	return len(distinct)
}

// apply applies one result. It reports whether a target of the outage responded, which ends it.
func (d *Detector) apply(now time.Time, h healthcheck.Health, check trench.Check) (over bool) {
	wasReady, known := d.seen[h.Key]
	switch {
	case h.State == healthcheck.Ready:
		d.seen[h.Key] = true
	case h.State != healthcheck.NotReady && h.State != healthcheck.Overdue:
		delete(d.seen, h.Key)
	case known:
		d.seen[h.Key] = false
	}
	failed := h.State == healthcheck.NotReady
	f := d.failed[h.Key]
	switch {
	case f == nil:
		if end := h.Since.Add(checkInterval(check)); wasReady && failed && h.Silent && end.After(now) {
			f = &failure{phase: pending}
			d.failed[h.Key] = f
			d.count[pending]++
			d.enter(h.Key, f, pending, end)
		}
		return false
	case failed && h.Silent && f.phase != recovering: // repeated failure
		return false
	}
	over = f.phase == suspected && !h.Silent && (failed || h.State == healthcheck.Ready)
	switch rises := failed && !h.Silent && h.LastError == "" && f.phase != pending; {
	case !rises:
		d.drop(h.Key)
	case !f.rising: // a further success does not extend the time
		f.rising = true
		d.enter(h.Key, f, recovering, now.Add(time.Duration(max(1, check.Rise))*checkInterval(check)))
	}
	return over
}

// enter moves a failure to a phase that ends at end; a zero end means no limit.
func (d *Detector) enter(k healthcheck.Key, f *failure, to phase, end time.Time) {
	d.count[f.phase]--
	d.count[to]++
	f.phase, f.end = to, end
	d.touched[k] = struct{}{}
	if !end.IsZero() && (d.next.IsZero() || end.Before(d.next)) {
		d.next = end
	}
}

// drop removes a failure, so that only the target's checks determine its readiness.
func (d *Detector) drop(k healthcheck.Key) {
	if f := d.failed[k]; f != nil {
		d.count[f.phase]--
		d.touched[k] = struct{}{}
		delete(d.failed, k)
	}
}

// expire drops the failures whose phase has ended.
func (d *Detector) expire(now time.Time) {
	if d.next.IsZero() || now.Before(d.next) {
		return
	}
	d.next = time.Time{}
	for k, f := range d.failed {
		switch {
		case f.end.IsZero():
		case !f.end.After(now):
			d.drop(k)
		case d.next.IsZero() || f.end.Before(d.next):
			d.next = f.end
		}
	}
}
