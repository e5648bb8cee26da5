package dataplane

import (
	"errors"
	"fmt"
	"log/slog"
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
//     difference is drift: [plan.State] contains it, and readiness follows the kernel immediately.
//     Routes that the kernel removed with a link are not drift; they are restored with the link
//     (updateNetwork).
//  3. decideRepairs selects the drift to repair now. It skips held streams (Hold) and objects
//     in back-off.
//  4. plan.ForStream restores a stream with all its targets, apply writes it and reads it
//     back, and repairs.note counts the repair, extends the back-off and reports it.

const (
	// contestedAfter is the number of successive repairs of one object that indicate another
	// process changing it repeatedly.
	contestedAfter = 5
	// repairMemory is the time without a change after which the back-off of an object ends.
	repairMemory = 30 * time.Second
)

// repairs holds the back-off of each object that another process changed.
type repairs struct {
	byObject map[[3]string]*repair
	total    uint64
	report   func([]Repaired) // nil: no report
	log      *slog.Logger
}

// repair is the back-off of one object.
type repair struct {
	times int
	retry backoff.Backoff
	// next is the earliest time of the next repair.
	next time.Time
}

// Repaired is one object that was restored.
type Repaired struct {
	plan.Drift
	// Contested: another process changes the object repeatedly. It is reported once. Later repairs
	// are not reported until the object is unchanged for repairMemory.
	Contested bool
}

// due reports whether at least one object's repair is due.
func (r *repairs) due(drift []plan.Drift, now time.Time, urgent bool) bool {
	return slices.ContainsFunc(drift, func(d plan.Drift) bool {
		repair := r.byObject[d.Key()]
		return urgent || repair == nil || !now.Before(repair.next)
	})
}

// note counts and reports the restored objects, and extends the back-off of all attempted repairs.
// left is the drift after the attempt.
func (r *repairs) note(now time.Time, attempted, left []plan.Drift) {
	failed := map[[3]string]bool{}
	for _, drift := range left {
		failed[drift.Key()] = true
	}
	var done []Repaired
	for _, drift := range attempted {
		object := r.byObject[drift.Key()]
		if object == nil || now.Sub(object.next) > repairMemory {
			// After repairMemory without a change the conflict is over: restart with the short delay.
			object = &repair{retry: backoff.Backoff{Min: failurePause, Max: maxPause}}
			r.byObject[drift.Key()] = object
		}
		object.next = now.Add(object.retry.Next())
		if failed[drift.Key()] {
			continue
		}
		object.times++
		r.total++
		// Beyond that the log would repeat the conflict with each repair.
		if object.times <= contestedAfter {
			done = append(done, Repaired{Drift: drift, Contested: object.times == contestedAfter})
		}
	}
	// Objects of removed streams would otherwise accumulate.
	maps.DeleteFunc(r.byObject, func(_ [3]string, object *repair) bool { return now.Sub(object.next) > repairMemory })
	if len(done) == 0 {
		return
	}
	r.log.Info("drift repaired", "objects", len(done), "first", done[0].Object)
	if i := slices.IndexFunc(done, func(repaired Repaired) bool { return repaired.Contested }); i >= 0 {
		r.log.Warn("another process keeps changing the data plane; repairs back off", "object", done[i].Object,
			"stream", done[i].Stream, "target", done[i].Target, "max_pause", maxPause)
	}
	if r.report != nil {
		r.report(done)
	}
}

// decideRepairs selects the streams whose drift is repaired now, and reports whether the common
// objects are repaired, too.
func (engine *engine) decideRepairs(now time.Time, urgent bool) (base bool) {
	for name, record := range engine.streams {
		record.repair = !engine.holds.held(name) && engine.repairs.due(record.drift, now, urgent)
	}
	return !engine.holds.held("") && engine.repairs.due(engine.baseDrift(), now, urgent)
}

// noteRepairs notes the repairs of a pass that began with the drift before.
func (engine *engine) noteRepairs(before []plan.Drift, base bool) {
	attempted := slices.DeleteFunc(before, func(drift plan.Drift) bool {
		record := engine.streams[drift.Stream]
		return drift.Stream == "" && !base || drift.Stream != "" && (record == nil || !record.repair)
	})
	engine.repairs.note(engine.now(), attempted, engine.drift())
}

// repairsAreSlow reports whether the due repairs take more than one transaction.
func (engine *engine) repairsAreSlow() bool {
	entries := 0
	for name, record := range engine.streams {
		for _, problem := range record.fault.Problems {
			if problem != "" && record.fault.Broken && !engine.holds.held(name) {
				entries += int(record.installed.Size)
			}
		}
	}
	return entries > fwstate.MaxElements
}

// reconcile reads everything and repairs all drift except in held streams, ignoring back-offs.
func (engine *engine) reconcile(desired *plan.Desired) ([]plan.Drift, error) {
	if desired == nil || desired.RoutesOnly || engine.targets == nil {
		return nil, errors.New("nothing is configured yet; try again in a moment")
	}
	// An operator's request must not depend on notifications that are still queued.
	engine.stale = everything
	if engine.observe(true); engine.readErr != nil {
		return nil, engine.readErr
	}
	before := engine.drift()
	if engine.converge(desired, true); engine.readErr != nil {
		return nil, engine.readErr
	}
	left := engine.drift()
	done := plan.Without(before, left, plan.Drift.Key)
	// Held drift is not a failure of this request.
	left = slices.DeleteFunc(left, func(drift plan.Drift) bool { return engine.holds.held(drift.Stream) })
	if len(left) > 0 {
		return done, fmt.Errorf("%d objects could not be repaired, the first is %s: %s",
			len(left), left[0].Object, left[0].Detail)
	}
	return done, nil
}
