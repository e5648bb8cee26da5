package lb

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// observer keeps health, metrics and status watchers up to date. It may lag behind the loop and
// never blocks it.
type observer struct {
	process *process
	ready   chan struct{}
	warned  bool // that lb and frontend share a SPIFFE ID
	started bool
	// dataPlane is the last state of the data plane.
	dataPlane plan.State

	mu      sync.Mutex
	pending map[vip.VIP]*readiness.VIPReadiness // nil: the VIP was removed
	wake    chan struct{}
}

func newObserver(p *process) *observer {
	return &observer{
		process: p, ready: make(chan struct{}),
		pending: map[vip.VIP]*readiness.VIPReadiness{}, wake: make(chan struct{}, 1),
	}
}

func (o *observer) String() string         { return "observer" }
func (o *observer) Ready() <-chan struct{} { return o.ready }

// decided conflates a decision until Run takes it. It does not block.
func (o *observer) decided(d readiness.Decision) {
	o.mu.Lock()
	for _, r := range d.Changed {
		o.pending[r.VIP] = &r
	}
	for _, v := range d.Removed {
		o.pending[v] = nil
	}
	o.mu.Unlock()
	latest.Wake(o.wake)
}

// Run follows identity, configuration, reports and decisions until ctx ends.
func (o *observer) Run(ctx context.Context) error {
	p := o.process
	close(o.ready)
	tick := time.NewTicker(time.Second) // last checks and ages in the status
	defer tick.Stop()
	targets := p.index.Watch(nil)
	defer targets.Close()
	var state plan.State
	var dataPlaneReady, dataPlaneChanged <-chan struct{}
	if p.plane != nil {
		dataPlaneReady = p.plane.Ready()
	}
	for {
		own, ownChanged := p.Identity.Status().Get()
		loaded, configChanged := p.config.Value().Get()
		report, reportChanged := p.server.Report().Get()
		states, statesChanged := p.sources.states.Get()
		o.showLiveness()
		o.warnSharedID(own.ID)
		p.condition(Identity, own.Problem())
		p.metrics.Identity(own.ID.String(), own.NotAfter)
		o.showConfiguration(loaded)
		p.metrics.Configuration(loaded.Err == nil)
		p.showEgress(report)
		p.metrics.Frontend(report.Connected, report.Advertised)
		o.showVIPs()
		p.condition(SourcesCondition, sourceProblem(states))
		if p.plane != nil {
			state, dataPlaneChanged = p.plane.State().Get()
			o.showDataPlane(state)
		}
		p.changed.Update(func(n uint64) uint64 { return n + 1 })
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ownChanged:
		case <-configChanged:
			p.metrics.Reload(p.config.Value().Load().Err == nil)
		case <-reportChanged:
		case <-statesChanged:
		case <-targets.Changed():
			targets.Take() // only that something changed matters here
		case <-dataPlaneReady:
			dataPlaneReady = nil
		case <-dataPlaneChanged:
		case <-o.wake:
		case <-tick.C:
		}
	}
}

// hungAfter is how long the readiness loop may be silent before the process should be restarted.
// Readiness is gone long before: the lease has ended.
const hungAfter = 10 * time.Second

func (o *observer) showLiveness() {
	select {
	case <-o.process.loop.Ready():
		idle := o.process.loop.idle()
		detail := fmt.Sprintf("readiness was last evaluated %v ago", idle.Round(time.Second))
		o.process.health.Set(Liveness, idle < hungAfter, detail)
	default: // still starting
	}
}

// showConfiguration shows whether the trench file on disk is in force, and whether the start is
// over.
func (o *observer) showConfiguration(l trench.Loaded) {
	p := o.process
	problem := text(l.Err)
	if problem == "" && l.Generation == 0 {
		problem = "the trench file was not read yet"
	}
	p.condition(Configuration, problem)
	if l.Generation > 0 {
		problem = "readiness is not synced yet: targets wait for their first verdict, or the kernel was not read"
		o.started = o.started || p.table.State().Synced
	} else {
		problem = "no trench file was accepted yet: " + problem
	}
	p.health.Set(Started, o.started, problem)
}

// warnSharedID warns once when the own ID is the frontend's, too.
func (o *observer) warnSharedID(own spiffeid.ID) {
	if !o.warned && slices.Contains(o.process.Frontends, own) {
		o.warned = true
		o.process.Log.Warn("lb and frontend share a SPIFFE ID: any container with it can be either; "+
			"see docs/operations.md for container selectors", "spiffe_id", own.String())
	}
}

func (o *observer) showVIPs() {
	o.mu.Lock()
	pending := o.pending
	o.pending = map[vip.VIP]*readiness.VIPReadiness{}
	o.mu.Unlock()
	for v, r := range pending {
		if r == nil {
			o.process.health.RemoveVIP(v)
			o.process.metrics.RemoveVIP(v)
			continue
		}
		o.process.health.SetVIP(v, r.State == readiness.Ready)
		o.process.metrics.VIP(v, r.State.String(), reasonWord(r.Reason), r.ReadyTargets, r.TotalTargets)
	}
}

// showEgress shows the external connectivity that the frontend reports.
func (p *process) showEgress(r readiness.Report) {
	problem := ""
	switch {
	case !r.Connected:
		problem = "no frontend is connected"
	case !r.Complete:
		problem = "the frontend has not reported yet"
	case !slices.Contains(slices.Collect(maps.Values(r.Families)), true):
		problem = "the frontend has no gateway"
	}
	p.condition(Egress, problem)
	for _, f := range vip.Families {
		name := fmt.Sprintf("%s/%s", Egress, f)
		if up, known := r.Families[f]; known {
			p.health.Set(name, r.Connected && up, "no "+f.String()+" gateway of the frontend is known to be up")
		} else {
			p.health.Remove(name)
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// sourceProblem returns what is wrong with the sources, "" if nothing is.
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

// andMore counts what a summary omits.
func andMore(n int) string {
	if n < 1 {
		return ""
	}
	return fmt.Sprintf(" (and %d more)", n)
}
