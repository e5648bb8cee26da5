package lb

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/tick"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// observer keeps health, metrics and status watchers up to date. It never blocks the loop.
type observer struct {
	process   *process
	warned    bool // that lb and frontend share a SPIFFE ID
	started   bool
	stale     bool               // last shown
	suspects  map[vip.VIP]string // last shown
	held      string             // ID that was last shown
	dataPlane plan.State         // last state
}

func newObserver(p *process) *observer {
	p.decisions = newDecisions(p.Log, p.table.Position().InstanceID, p.metrics.Count)
	p.metrics.VIPs(p.decisions.states)
	p.health.ServeVIPs(p.decisions.serves)
	return &observer{process: p}
}

func (o *observer) String() string { return "observer" }

// Run follows identity, configuration, reports and decisions until ctx ends.
func (o *observer) Run(ctx context.Context) error {
	p := o.process
	refresh := time.After(tick.Until(time.Now(), time.Second)) // of last checks and ages in the status
	targets := p.index.Watch(nil)
	defer targets.Close()
	var state plan.State
	var dataPlaneReady, dataPlaneChanged, suspectsChanged <-chan struct{}
	plane := p.loop.plane
	if plane != nil {
		dataPlaneReady = plane.Ready()
	}
	for {
		// Get the channels before updating: a change after a Get closes its channel.
		own, ownChanged := p.Identity.Status().Get()
		loaded, configChanged := p.config.Value().Get()
		stale, staleChanged := p.config.Stale().Get()
		report, reportChanged := p.server.Report().Get()
		_, watchingChanged := p.availability.Watching().Get()
		states, statesChanged := p.sources.states.Get()
		// Probes check the loops themselves. This call updates open watches and metrics.
		p.health.CheckLoops()
		// The own ID is unknown until the first SVID arrives. Users of one host are shared on purpose.
		if !o.warned && !own.NotAfter.IsZero() && slices.Contains(p.Frontends, own.ID) {
			o.warned = true
			p.Log.Warn("lb and frontend share a SPIFFE ID: any container with it can be either; "+
				"see docs/operations.md for container selectors", "spiffe_id", own.ID.String())
		}
		p.health.Report(Identity, own.Problem())
		p.metrics.Identity(own.ID.String(), own.NotAfter)
		o.showConfiguration(loaded)
		p.metrics.Configuration(loaded.Err == nil)
		o.showStale(stale)
		p.showEgress(report)
		p.metrics.Frontend(report.Connected, report.Exported)
		// Watches read the recorded decisions, so notify them after the drain.
		p.decisions.queue.Settle(ctx, 0)
		if p.decisions.drain() {
			p.health.VIPsChanged()
		}
		p.health.Report(SourcesCondition, sourceProblem(states))
		if p.probes != nil {
			var suspects map[vip.VIP]string
			suspects, suspectsChanged = p.probes.Suspects().Get()
			p.health.Report(ProbesCondition, probeProblem(suspects, p.probes.Problem()))
			p.decisions.journal.Add(suspectEvents(o.suspects, suspects)...)
			o.suspects = suspects
		}
		if plane != nil {
			state, dataPlaneChanged = plane.State().Get()
			o.showDataPlane(state)
		}
		// Status watchers are notified last, because they read all of the state above.
		p.changed.Update(func(n uint64) uint64 { return n + 1 })
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ownChanged:
		case <-configChanged:
			p.metrics.Reload(p.config.Value().Load().Err == nil)
		case <-staleChanged:
		case <-reportChanged:
		case <-watchingChanged:
		case <-statesChanged:
		case <-targets.Changed():
			targets.Take() // the status reads the index itself
		case <-suspectsChanged:
		case <-dataPlaneReady:
			// A closed channel would be selected in each pass.
			dataPlaneReady = nil
		case <-dataPlaneChanged:
		case <-p.decisions.queue.Wake():
		case <-refresh:
			refresh = time.After(tick.Until(time.Now(), time.Second))
		}
	}
}

// showConfiguration publishes whether the trench file is in force, and whether the start is over.
func (o *observer) showConfiguration(l trench.Loaded) {
	p := o.process
	problem := logs.Text(l.Err)
	if problem == "" && l.Generation == 0 {
		problem = "the trench file was not read yet"
	}
	p.health.Report(Configuration, problem)
	held := l.Held.Problem()
	p.health.Report(Held, held)
	p.metrics.Held(l.Held.Count())
	p.table.SetHeld(l.Held.Targets())
	if l.Held.ID != o.held {
		p.decisions.journal.Add(&adminv1.Event{Object: "held removals", To: cmp.Or(l.Held.ID, "none"), Detail: held})
	}
	o.held = l.Held.ID
	if l.Generation > 0 {
		problem = "readiness is not synced yet: targets wait for their first verdict, or the kernel was not read"
		// Started stays true: a later loss must not block a rollout (docs/adr/0015-start-gate.md).
		o.started = o.started || p.table.Synced()
	} else {
		problem = "no trench file was accepted yet: " + problem
	}
	p.health.Set(Started, o.started, problem)
}

// showStale publishes whether the writer of the trench file refreshes it.
func (o *observer) showStale(s *trench.Stale) {
	p, now := o.process, time.Now()
	problem := s.Problem(now)
	p.health.Report(TrenchFile, problem)
	p.metrics.Stale(s.Age(now))
	switch is := problem != ""; {
	case is && !o.stale:
		p.decisions.journal.Add(&adminv1.Event{Object: "trench file", To: "stale", Detail: problem})
	case !is && o.stale:
		p.decisions.journal.Add(&adminv1.Event{Object: "trench file", To: "refreshed"})
	}
	o.stale = problem != ""
}

// showEgress publishes the external connectivity that the frontend reports.
func (p *process) showEgress(r readiness.Report) {
	problem := ""
	switch {
	case !r.Connected && p.availability.Watching().Load() > 0:
		problem = "a frontend of Meridio is connected, which does not report its gateways"
	case !r.Connected:
		problem = "no frontend is connected"
	case !r.Complete:
		problem = "the frontend has not reported yet"
	case !slices.Contains(slices.Collect(maps.Values(r.Families)), true):
		problem = "the frontend has no gateway"
	}
	p.health.Report(Egress, problem)
	for _, f := range vip.Families {
		name := fmt.Sprintf("%s/%s", Egress, f)
		if up, known := r.Families[f]; known {
			p.health.Set(name, r.Connected && up, "no "+f.String()+" gateway of the frontend is known to be up")
		} else {
			// The frontend reports only the families that have VIPs.
			p.health.Remove(name)
		}
	}
}

// sourceProblem returns the problems of the sources, or "".
func sourceProblem(states []sourceState) string {
	var problems []string
	for _, s := range states {
		if !s.Live {
			problems = append(problems, fmt.Sprintf("%s is gone (%s): %s", s.Name, s.OnGone, s.Detail))
		}
		if n := len(s.Problems); n > 0 {
			problems = append(problems, s.Name+": "+s.Problems[0]+andMore(n-1))
		}
	}
	return strings.Join(problems, "; ")
}

// andMore returns the number of omitted items as text; "" for none.
func andMore(n int) string {
	if n < 1 {
		return ""
	}
	return fmt.Sprintf(" (and %d more)", n)
}
