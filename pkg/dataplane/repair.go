package dataplane

import (
	"fmt"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

const (
	// contestedAfter is how many repairs of one object in succession mean that another
	// process keeps changing it.
	contestedAfter = 5
	// repairMemory is how long an object must stay as it is for its back-off to end.
	repairMemory = 30 * time.Second
)

// repair is the back-off of one object that another process changed.
type repair struct {
	times int
	pause time.Duration
	// next is when it may be repaired again.
	next time.Time
}

// Repaired is one object that was restored.
type Repaired struct {
	Drift
	// Contested: another process keeps changing it. That is reported once, and no repair
	// after it until the object has been left alone for a while.
	Contested bool
}

// due reports whether some of the drift is to be repaired now.
func (e *engine) due(drift []Drift, now time.Time, urgent bool) bool {
	return slices.ContainsFunc(drift, func(d Drift) bool {
		r := e.repairs[d.Key()]
		return urgent || r == nil || !now.Before(r.next)
	})
}

// nextRepair is when the next back-off of existing drift ends.
func (e *engine) nextRepair() (at time.Time, ok bool) {
	if e.observed == nil || e.desired == nil {
		return at, false
	}
	for _, d := range e.drift() {
		r := e.repairs[d.Key()]
		if r != nil && !e.held(d.Stream) && (!ok || r.next.Before(at)) {
			at, ok = r.next, true
		}
	}
	return at, ok
}

// noteRepairs counts what was restored of the drift, lengthens the back-off of what was
// attempted, and reports it.
func (e *engine) noteRepairs(before []Drift, base bool) {
	now := e.now()
	left := map[plan.DriftKey]bool{}
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
			r = &repair{pause: failurePause / 2}
			e.repairs[d.Key()] = r
		}
		r.pause = min(2*r.pause, maxPause)
		r.next = now.Add(r.pause)
		if left[d.Key()] {
			continue
		}
		r.times++
		e.repaired++
		if r.times <= contestedAfter {
			done = append(done, Repaired{Drift: d, Contested: r.times == contestedAfter})
		}
	}
	for k, r := range e.repairs {
		if now.Sub(r.next) > repairMemory {
			delete(e.repairs, k)
		}
	}
	if len(done) == 0 {
		return
	}
	e.log.Info("drift repaired", "objects", len(done), "first", done[0].Object)
	if i := slices.IndexFunc(done, func(r Repaired) bool { return r.Contested }); i >= 0 {
		d := done[i]
		e.log.Warn("another process keeps changing the data plane; repairs back off", "object", d.Object, "stream", d.Stream, "target", d.Target, "max_pause", maxPause)
	}
	if e.o.OnRepair != nil {
		e.o.OnRepair(done)
	}
}

// repairsAreSlow reports whether what is to be restored takes more than one transaction.
func (e *engine) repairsAreSlow() bool {
	n := 0
	for name, m := range e.streams {
		if !m.fault.Broken || e.held(name) {
			continue
		}
		for _, problem := range m.fault.Problems {
			if problem != "" {
				n += int(e.installed.Streams[name].Size)
			}
		}
	}
	return n > fwstate.MaxElements
}

// baseDrift is the drift of what no stream owns.
func (e *engine) baseDrift() []Drift {
	switch {
	case e.observed.Base || !e.hasApplied():
		return nil
	case e.observed.Problem != "":
		return []Drift{{Object: "table inet " + TableName, Detail: e.observed.Problem}}
	}
	return []Drift{{Object: fmt.Sprintf("policy rules of priority %d and %d", e.o.Priority, e.o.Priority+2), Detail: "one of them is missing or changed"}}
}

// without returns the drifts of a that are not in b.
func without(a, b []Drift) []Drift {
	in := make(map[plan.DriftKey]bool, len(b))
	for _, d := range b {
		in[d.Key()] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(d Drift) bool { return in[d.Key()] })
}
