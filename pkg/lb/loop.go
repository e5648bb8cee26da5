package lb

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// checker is a [healthcheck.Checker], or a fake in tests.
type checker interface {
	Update(changed []trench.Stream, removed []string)
	Routed()
	Changed() <-chan struct{}
	Evaluate(now time.Time) healthcheck.Evaluation
}

// plane is a [dataplane.Plane], or a fake in tests.
type plane interface {
	Configure(*plan.Desired)
	State() *latest.Value[plan.State]
	Ready() <-chan struct{}
}

// frontend is a [readiness.Server], or a fake in tests.
type frontend interface {
	Report() *latest.Value[readiness.Report]
	Reported(vip.VIP) (readiness.VIPReport, bool)
}

// loop evaluates readiness. It alone renews the lease, so the lease expires without evaluation.
type loop struct {
	config  *latest.Value[trench.Loaded]
	sources *sources
	checker checker
	index   *targetset.Index
	table   *readiness.Table
	lease   time.Duration
	log     *slog.Logger
	observe func(readiness.Decision, uint64) // takes each decision and its revision; must not block
	trace   func(decision)                   // takes each committed decision; nil: none; must not block
	files   *readinessfile.Writer            // nil: none are written
	// suspects holds the VIPs that probes find dead through this pod; nil: there are no probes.
	suspects *latest.Value[map[vip.VIP]string]
	away     *latest.Value[bool] // true once the load balancer stops
	// configured, unless nil, is called after the first configuration's evaluation; must not block.
	configured func()
	ready      chan struct{}
	pulse      task.Pulse

	plane      plane // nil: no data plane
	frontend   frontend
	applied    func(time.Duration)                // records the time until the kernel applied a state; must not block
	forwarding atomic.Pointer[serving.Forwarding] // newest, with its desired state
	sent       map[uint64]time.Time               // by revision that the kernel has not applied yet
	reported   <-chan struct{}                    // of the frontend; nil while nothing is held back

	evaluator  *serving.Evaluator
	synced     bool
	generation uint64                        // of the configuration in force
	inForce    atomic.Pointer[trench.Config] // the same, with the departures
	next       time.Time                     // when a wait or a hold of the evaluator ends
	departures departures
	compared   bool // the data plane has read the kernel, or failed to
	leaving    bool // the readiness files are no longer written
}

// withPlane connects the loop with a data plane before it runs.
func (l *loop) withPlane(p plane, f frontend, applied func(time.Duration)) {
	l.plane, l.frontend, l.applied, l.sent = p, f, applied, map[uint64]time.Time{}
	l.forwarding.Store(&serving.Forwarding{Desired: &plan.Desired{}})
}

func (l *loop) String() string         { return "readiness loop" }
func (l *loop) Ready() <-chan struct{} { return l.ready }

// Overdue implements task.Loop.
func (l *loop) Overdue() time.Duration { return l.pulse.Overdue() }

// Run evaluates until ctx ends.
func (l *loop) Run(ctx context.Context) error {
	// The first evaluation is due now, so that Liveness notices if it hangs.
	l.pulse.Next(0)
	defer l.pulse.End()
	loaded, reloaded := l.config.Get()
	_, stopping := l.away.Get()
	in := l.load(loaded)
	var state plan.State
	var confirmed, compared <-chan struct{}
	if l.plane != nil {
		compared = l.plane.Ready()
		state, confirmed = l.plane.State().Get()
		in.kernel = &state
	}
	var suspected <-chan struct{}
	if l.suspects != nil {
		_, suspected = l.suspects.Get()
	}
	// Heartbeats are aligned to the wall clock and share a wake-up with other timers of the pod.
	beat := time.NewTimer(untilBeat(l.lease))
	defer beat.Stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	// Readiness is served only after this evaluation; see awaitReadiness.
	l.evaluate(in)
	l.sources.publish()
	close(l.ready)
	for {
		next := targetset.Soonest(l.sources.next, l.next)
		next = targetset.Soonest(next, l.departures.next(time.Now(), l.evaluator))
		if !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		in = input{}
		beats := false
		l.pulse.Next(l.lease)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-reloaded:
			loaded, reloaded = l.config.Get()
			in = l.load(loaded)
		case <-l.sources.registry.Changed():
			in.targets = true
		case <-l.sources.drains.Changed():
			in.targets = true
		// decide collects the new verdicts itself.
		case <-l.checker.Changed():
		case <-compared:
			// A condition of the first synced decision.
			l.compared, compared = true, nil
			state = l.plane.State().Load()
			in.kernel = &state
		case <-confirmed:
			state, confirmed = l.plane.State().Get()
			in.kernel = &state
		case <-suspected:
			var suspects map[vip.VIP]string
			suspects, suspected = l.suspects.Get()
			l.evaluator.Suspect(suspects)
		case <-l.reported: // held changes may be released
		case <-stopping:
			var away bool
			if away, stopping = l.away.Get(); away && l.files != nil { // withdraw first, and continue to forward
				l.leaving = true
				l.files.Want(nil)
			}
		case <-timer.C:
		case <-beat.C:
			beat.Reset(untilBeat(l.lease))
			beats = true
		}
		// A commit renews the lease, too.
		if !l.evaluate(in) {
			l.table.Heartbeat()
		}
		if beats {
			l.sources.publish()
		}
		if l.files != nil {
			l.files.Beat()
		}
	}
}

// untilBeat returns the time until the next heartbeat.
func untilBeat(lease time.Duration) time.Duration {
	return tick.UntilPart(time.Now(), min(lease, BeatsPerLease*maxBeat), BeatsPerLease)
}

// load returns the input of a read trench file. An accepted file may have been followed by a
// refused one before the loop read it, so the generation decides.
func (l *loop) load(x trench.Loaded) input {
	in := input{targets: true, lost: x.Err}
	if x.Err == nil || x.Generation != l.generation {
		in.config = x.Config
	}
	l.generation = x.Generation
	return in
}

// input holds the changes since the last evaluation.
type input struct {
	config  *trench.Config // nil: the same as before
	lost    error          // why the trench file on the disk is not in force
	targets bool           // the sources may have other targets
	kernel  *plan.State    // nil: the same as before
}

type decision struct {
	serving.Result
	at        time.Time
	committed bool // to the table, as revision; otherwise nothing changed
	revision  uint64
	first     bool // readiness is synced with it
	// The following are for a trace.
	verdicts []healthcheck.Health
	done     time.Time // of the commit
}

// evaluate derives one decision from all inputs, and reports whether it committed anything.
func (l *loop) evaluate(in input) bool {
	d := l.decide(in)
	l.publish(in, d)
	if in.config != nil && l.configured != nil {
		l.configured()
		l.configured = nil
	}
	return d.committed
}

// decide evaluates readiness and commits the changes first, so that the data plane, logs and
// metrics do not delay the frontend.
func (l *loop) decide(in input) decision {
	now := time.Now()
	in.config = l.depart(now, in.config)
	if in.config != nil {
		l.sources.configure(now, in.config)
		l.inForce.Store(in.config)
	}
	l.sources.missing(now, in.lost)
	// Heartbeats skip the sources: only new input or the end of a drain changes their targets.
	if in.config != nil || in.targets || (!l.sources.next.IsZero() && !l.sources.next.After(now)) {
		changes := l.sources.update(now)
		l.checker.Update(changes.Streams, changes.Removed)
		if in.config != nil {
			l.evaluator.Configure(now, in.config, l.sources.set.Members)
		} else {
			l.evaluator.Retarget(now, changes.Streams, l.sources.set.Members)
		}
	}
	if in.kernel != nil {
		l.evaluator.Confirm(*in.kernel)
		// Targets that wait for a fwmark can be checked now.
		l.checker.Routed()
		// A kernel that cannot be read must not delay the first synced decision.
		l.compared = l.compared || in.kernel.Err != nil
	}
	evaluation := l.checker.Evaluate(now)
	d := decision{Result: l.evaluator.Evaluate(now, evaluation), at: now, verdicts: evaluation.Changed}
	l.next = d.Next
	l.commit(&d)
	if l.trace != nil && d.committed {
		d.done = time.Now()
	}
	return d
}

// depart returns the configuration to put in force for a new trench file, or once a VIP that left
// the file has drained or one has moved; nil for the same as before.
func (l *loop) depart(now time.Time, file *trench.Config) *trench.Config {
	config, late := l.departures.expire(now, l.evaluator)
	if len(late) > 0 {
		l.log.Warn("VIPs move to a stream that is not ready", "vips", len(late), "from", late[0].From, "to", late[0].To,
			"after", maxMove)
	}
	if file != nil {
		config = l.departures.configure(now, file, l.evaluator)
	}
	// The evaluator keeps these VIPs at most DRAINING until their ends, or with their old streams.
	if config != nil {
		l.evaluator.Leave(l.departures.ends)
		l.evaluator.Move(l.departures.moving())
	}
	return config
}

// publish passes a committed decision to the data plane, files, the index and the observer.
func (l *loop) publish(in input, d decision) {
	switch {
	case l.plane != nil && l.synced:
		l.next = targetset.Soonest(l.next, l.forward(d.at))
	// Until readiness is synced, the kernel keeps the state of the previous process. Checks of new
	// targets need only routes.
	case l.plane != nil && (in.config != nil || in.targets):
		l.plane.Configure(l.evaluator.Routes())
	}
	// Before the first synced decision, targets wait for verdicts. At a stop the list stays empty.
	if (d.committed || d.StreamsChanged || in.config != nil) && l.files != nil && l.synced && !l.leaving {
		streams, vips := l.evaluator.Ready()
		l.files.Want(streams, vips...)
	}
	// A reader that lists all targets holds the index for milliseconds.
	l.index.Publish(l.evaluator.Targets())
	if d.first {
		l.log.Info("readiness is synced", "revision", d.revision)
	}
	if d.committed {
		l.observe(d.Decision, d.revision)
		if l.trace != nil {
			l.trace(d)
		}
	}
}

// forward passes a changed desired state to the data plane. It returns when to call it again.
func (l *loop) forward(now time.Time) (next time.Time) {
	state := l.plane.State().Load()
	// The data plane applies only the newest state, so one state may confirm several revisions.
	for revision, at := range l.sent {
		if revision <= state.Revision {
			l.applied(max(0, state.At.Sub(at)))
			delete(l.sent, revision)
		}
	}
	report, changed := l.frontend.Report().Get()
	out := l.evaluator.Forward(now, serving.Frontend{
		Report: report, Reported: l.frontend.Reported, Position: l.table.Position(),
	})
	// Reports of the frontend wake the loop only while they can release a held change.
	if l.reported = nil; len(out.Held) > 0 {
		l.reported = changed
	}
	// Without a change, status continues to show the last desired state.
	if out.Desired == nil {
		out.Desired = l.forwarding.Load().Desired
	} else {
		l.sent[out.Desired.Revision] = now
		l.plane.Configure(out.Desired)
	}
	l.forwarding.Store(&out)
	for _, r := range out.Released {
		l.log.Log(context.Background(), r.Level, r.Cause+"; the last targets of VIPs leave the data plane",
			"stream", r.Stream, "vips", r.VIPs, "after", r.After.Round(time.Millisecond))
	}
	return out.Next
}

// commit commits a decision unless nothing changed.
func (l *loop) commit(d *decision) {
	d.first = !l.synced && l.generation > 0 && !d.Settling && (l.plane == nil || l.compared)
	l.synced = l.synced || d.first
	// The first synced decision is committed without changes, too: readers wait for Synced.
	if len(d.Changed)+len(d.Removed) == 0 && !d.first {
		return
	}
	d.Synced, d.At, d.committed = l.synced, d.at, true
	d.revision = l.table.Commit(d.Decision)
}
