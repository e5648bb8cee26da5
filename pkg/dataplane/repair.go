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

// Repair after another process deletes a rule, or changes any other object of the data plane:
//
//  1. The kernel sends a notification (fwstate.Watch), and the reconciler reads the stale parts.
//     Without a notification the full read of each fullReadInterval detects the change.
//  2. diff compares observed with installed state (plan.TargetDrift, plan.StreamDrift). The
//     difference is drift: [State] contains it, and readiness follows the kernel immediately.
//     Routes that the kernel removed with a link are not drift; they are restored with the link
//     (updateNetwork).
//  3. decideRepairs selects the drift to repair now. It skips held streams (Hold) and objects
//     in back-off.
//  4. plan.ForStream restores a stream with all its targets, apply writes it and reads it
//     back, and noteRepairs counts the repair, extends the back-off and reports it.

const (
	// contestedAfter is the number of successive repairs of one object that indicate another
	// process changing it repeatedly.
	contestedAfter = 5
	// repairMemory is the time without a change after which the back-off of an object ends.
	repairMemory = 30 * time.Second
)

// repair is the back-off of one object that another process changed.
type repair struct {
	times int
	retry backoff.Backoff
	// next is the earliest time of the next repair.
	next time.Time
}

// Repaired is one object that was restored.
type Repaired struct {
	Drift
	// Contested: another process changes the object repeatedly. It is reported once. Later repairs
	// are not reported until the object is unchanged for repairMemory.
	Contested bool
}

// decideRepairs selects the streams whose drift is repaired now, and reports whether the common
// objects are repaired, too.
func (e *engine) decideRepairs(now time.Time, urgent bool) (base bool) {
	for name, m := range e.streams {
		m.repair = !e.held(name) && e.due(m.drift, now, urgent)
	}
	return !e.held("") && e.due(e.baseDrift(), now, urgent)
}

// due reports whether at least one object's repair is due.
func (e *engine) due(drift []Drift, now time.Time, urgent bool) bool {
	return slices.ContainsFunc(drift, func(d Drift) bool {
		r := e.repairs[d.Key()]
		return urgent || r == nil || !now.Before(r.next)
	})
}

// noteRepairs counts the restored objects, extends the back-off of all attempted repairs, and
// reports the repairs.
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

// baseDrift returns the drift of the common objects.
func (e *engine) baseDrift() []Drift {
	applied := func(m *streamRecord) bool { return m.installed != nil && m.installed.Stage == plan.StageApplied }
	switch {
	case e.observed.Base || !e.any(applied): // only an applied stream requires the common objects
		return nil
	case e.observed.Problem != "":
		return []Drift{{Object: "table inet " + TableName, Detail: e.observed.Problem}}
	}
	rules := fmt.Sprintf("policy rules of priority %d and %d", e.o.Priority, e.o.Priority+2)
	return []Drift{{Object: rules, Detail: "one of them is missing or changed"}}
}

// noteDrift records the start of each difference and logs new drift.
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

// reconcile reads everything and repairs all drift except in held streams, ignoring back-offs.
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
