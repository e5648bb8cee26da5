package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// What happens when another process deletes a rule, or changes any other object of the data plane:
//
//  1. The kernel reports it (fwstate.Watch), and the reconciler reads what is stale.
//     Without a report it is found by the check of everything each fullReadInterval.
//  2. diff compares what was read with what is installed (plan.TargetDrift,
//     plan.StreamDrift). The difference is drift: [State] shows it, and readiness follows
//     the kernel at once. Routes that the kernel removed with a link are no drift; they
//     come back with the link (updateNetwork).
//  3. decideRepairs selects the drift to repair now: not that of held streams (Hold), and
//     not an object whose back-off runs.
//  4. plan.ForStream restores a stream with all its targets, apply writes it and reads it
//     back, and noteRepairs counts it, lengthens the back-off and reports it.

const (
	// contestedAfter is the number of successive repairs of one object that mean that
	// another process keeps changing it.
	contestedAfter = 5
	// repairMemory is how long an object must stay unchanged for its back-off to end.
	repairMemory = 30 * time.Second
)

// repair is the back-off of one object that another process changed.
type repair struct {
	times int
	retry backoff.Backoff
	// next is when it may be repaired again.
	next time.Time
}

// Repaired is one object that was restored.
type Repaired struct {
	Drift
	// Contested: another process keeps changing it. This is reported once, and later repairs
	// are not, until the object stays unchanged for a while.
	Contested bool
}

// decideRepairs selects the streams whose drift is repaired now, and reports whether the
// objects that no stream owns are repaired as well.
func (e *engine) decideRepairs(now time.Time, urgent bool) (base bool) {
	for name, m := range e.streams {
		m.repair = !e.held(name) && e.due(m.drift, now, urgent)
	}
	return !e.held("") && e.due(e.baseDrift(), now, urgent)
}

// due reports whether some of the drift is to be repaired now.
func (e *engine) due(drift []Drift, now time.Time, urgent bool) bool {
	return slices.ContainsFunc(drift, func(d Drift) bool {
		r := e.repairs[d.Key()]
		return urgent || r == nil || !now.Before(r.next)
	})
}

// noteRepairs counts what was restored of the drift, lengthens the back-off of what was
// attempted, and reports it.
func (e *engine) noteRepairs(before []Drift, base bool) {
	now := e.now()
	left := map[[3]string]bool{}
	for _, d := range e.drift() {
		left[d.Key()] = true
	}
	var done []Repaired
	for _, d := range before {
		m := e.streams[d.Stream]
		if d.Stream == "" && !base || d.Stream != "" && (m == nil || !m.repair) {
			continue
		}
		r := e.repairs[d.Key()]
		if r == nil || now.Sub(r.next) > repairMemory {
			r = &repair{retry: backoff.Backoff{Min: failurePause, Max: maxPause}}
			e.repairs[d.Key()] = r
		}
		r.next = now.Add(r.retry.Next())
		if left[d.Key()] {
			continue
		}
		r.times++
		e.repaired++
		if r.times <= contestedAfter {
			done = append(done, Repaired{Drift: d, Contested: r.times == contestedAfter})
		}
	}
	maps.DeleteFunc(e.repairs, func(_ [3]string, r *repair) bool { return now.Sub(r.next) > repairMemory })
	if len(done) == 0 {
		return
	}
	e.log.Info("drift repaired", "objects", len(done), "first", done[0].Object)
	if i := slices.IndexFunc(done, func(r Repaired) bool { return r.Contested }); i >= 0 {
		d := done[i]
		e.log.Warn("another process keeps changing the data plane; repairs back off",
			"object", d.Object, "stream", d.Stream, "target", d.Target, "max_pause", maxPause)
	}
	if e.o.OnRepair != nil {
		e.o.OnRepair(done)
	}
}

// repairsAreSlow reports whether the due repairs take more than one transaction.
func (e *engine) repairsAreSlow() bool {
	n := 0
	for name, m := range e.streams {
		for _, problem := range m.fault.Problems {
			if problem != "" && m.fault.Broken && !e.held(name) {
				n += int(m.installed.Size)
			}
		}
	}
	return n > fwstate.MaxElements
}

// baseDrift is the drift of what no stream owns.
func (e *engine) baseDrift() []Drift {
	applied := func(m *streamRecord) bool { return m.installed != nil && m.installed.Stage == plan.StageApplied }
	switch {
	case e.observed.Base || !e.any(applied): // a stream that is applied requires the common objects
		return nil
	case e.observed.Problem != "":
		return []Drift{{Object: "table inet " + TableName, Detail: e.observed.Problem}}
	}
	rules := fmt.Sprintf("policy rules of priority %d and %d", e.o.Priority, e.o.Priority+2)
	return []Drift{{Object: rules, Detail: "one of them is missing or changed"}}
}

// noteDrift records since when objects differ, and logs new drift.
func (e *engine) noteDrift() {
	since := map[[3]string]time.Time{}
	var found []Drift
	for _, d := range e.drift() {
		at, known := e.since[d.Key()]
		if !known {
			at = e.now()
			found = append(found, d)
		}
		since[d.Key()] = at
	}
	if len(found) > 0 {
		d := found[0]
		e.log.Warn("drift detected", "objects", len(found), "first", d.Object, "detail", d.Detail,
			"stream", d.Stream, "target", d.Target, "held", e.held(d.Stream))
	}
	if n := len(e.since) + len(found) - len(since); n > 0 {
		e.log.Info("drift resolved", "objects", n)
	}
	e.since = since
}

// drift lists the differences between installed and observed state, sorted.
func (e *engine) drift() []Drift {
	all := e.baseDrift()
	if len(all) == 0 && !e.any(func(m *streamRecord) bool { return len(m.drift) > 0 }) {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(e.streams)) {
		all = append(all, e.streams[name].drift...)
	}
	for i, d := range all {
		all[i].Since = e.since[d.Key()]
	}
	return all
}

// reconcile reads everything and repairs drift without back-off, except that of held streams.
func (e *engine) reconcile(w *Desired) ([]Drift, error) {
	if w == nil || w.RoutesOnly || e.targets == nil {
		return nil, errors.New("nothing is configured yet; try again in a moment")
	}
	e.stale = everything
	if e.observe(true); e.readErr != nil {
		return nil, e.readErr
	}
	before := e.drift()
	if e.converge(w, true); e.readErr != nil {
		return nil, e.readErr
	}
	left := e.drift()
	done := plan.Without(before, left, Drift.Key)
	left = slices.DeleteFunc(left, func(d Drift) bool { return e.held(d.Stream) })
	if len(left) > 0 {
		return done, fmt.Errorf("%d objects could not be repaired, the first is %s: %s",
			len(left), left[0].Object, left[0].Detail)
	}
	return done, nil
}
