package lb

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// observer keeps health, metrics and status watchers up to date. It may lag
// behind the loop, never hold it up.
type observer struct {
	process *process
	ready   chan struct{}
	warned  bool // that lb and frontend share a SPIFFE ID
	started bool
	// dataPlane is the last state of the data plane, failures how often it failed
	// in all.
	dataPlane dataplane.State
	failures  atomic.Uint64

	mu      sync.Mutex
	pending map[vip.VIP]*readiness.VIPReadiness // nil: the VIP is gone
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
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// Run follows identity, configuration, reports and decisions until ctx ends.
func (o *observer) Run(ctx context.Context) error {
	p := o.process
	close(o.ready)
	tick := time.NewTicker(time.Second) // last checks and ages in the status
	defer tick.Stop()
	own, ownChanged := p.Identity.Status().Get()
	loaded, configChanged := p.config.Value().Get()
	report, reportChanged := p.server.Report().Get()
	states, statesChanged := p.sources.states.Get()
	var dataPlaneChanged, dataPlaneReady <-chan struct{}
	if p.plane != nil {
		dataPlaneReady = p.plane.Ready()
		var state dataplane.State
		state, dataPlaneChanged = p.plane.State().Get()
		o.lookAtDataPlane(state)
	}
	targets := p.index.Watch(nil)
	defer targets.Close()
	for {
		o.showLiveness()
		o.warnSharedID(own.ID)
		p.health.Set(Identity, own.Problem() == "", own.Problem())
		p.metrics.Identity(own.ID.String(), own.NotAfter)
		o.showConfiguration(loaded)
		p.metrics.Configuration(loaded.Err == nil)
		p.setEgress(report)
		p.metrics.Frontend(report.Connected, report.Advertised)
		o.showVIPs()
		problem := sourceProblem(states)
		p.health.Set(SourcesCondition, problem == "", problem)
		p.changed.Update(func(n uint64) uint64 { return n + 1 })
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ownChanged:
			own, ownChanged = p.Identity.Status().Get()
		case <-configChanged:
			loaded, configChanged = p.config.Value().Get()
			p.metrics.Reload(loaded.Err == nil)
		case <-reportChanged:
			report, reportChanged = p.server.Report().Get()
		case <-statesChanged:
			states, statesChanged = p.sources.states.Get()
		case <-targets.Changed():
			targets.Take() // only that something changed matters here
		case <-dataPlaneReady:
			dataPlaneReady = nil
			o.lookAtDataPlane(p.plane.State().Load())
		case <-dataPlaneChanged:
			var state dataplane.State
			state, dataPlaneChanged = p.plane.State().Get()
			o.lookAtDataPlane(state)
		case <-o.wake:
		case <-tick.C:
		}
	}
}

// hungAfter is how long the readiness loop may be silent before the process
// should be restarted. Readiness is gone long before: the lease has ended.
const hungAfter = 10 * time.Second

// showConfiguration shows whether the trench file on disk is the one in force, and
// whether the start is over.
func (o *observer) showConfiguration(l trench.Loaded) {
	p := o.process
	problem := text(l.Err)
	if problem == "" && l.Generation == 0 {
		problem = "the trench file was not read yet"
	}
	p.health.Set(Configuration, problem == "", problem)
	if l.Generation > 0 {
		problem = "readiness is not synced yet: targets wait for their first verdict, or the kernel was not read"
		o.started = o.started || p.table.State().Synced
	} else {
		problem = "no trench file was accepted yet: " + problem
	}
	p.health.Set(Started, o.started, problem)
}

func (o *observer) showLiveness() {
	select {
	case <-o.process.loop.Ready():
		idle := o.process.loop.idle()
		o.process.health.Set(Liveness, idle < hungAfter, fmt.Sprintf("readiness was last evaluated %v ago", idle.Round(time.Second)))
	default: // still starting
	}
}

// warnSharedID warns once when our own ID is the frontend's as well.
func (o *observer) warnSharedID(own spiffeid.ID) {
	if !o.warned && slices.Contains(o.process.Frontends, own) {
		o.warned = true
		o.process.Log.Warn("lb and frontend share a SPIFFE ID: any container with it can be either; see docs/operations.md for container selectors", "spiffe_id", own.String())
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

// setEgress shows the external connectivity that the frontend reports.
func (p *process) setEgress(r readiness.Report) {
	up := 0
	for _, u := range r.Families {
		if u {
			up++
		}
	}
	switch {
	case !r.Connected:
		p.health.Set(Egress, false, "no frontend is connected")
	case !r.Complete:
		p.health.Set(Egress, false, "the frontend has not reported yet")
	case up == 0:
		p.health.Set(Egress, false, "the frontend has no gateway")
	default:
		p.health.Set(Egress, true, "")
	}
	for _, f := range vip.Families {
		name := fmt.Sprintf("%s/%s", Egress, f)
		if u, known := r.Families[f]; known {
			p.health.Set(name, r.Connected && u, "no "+f.String()+" gateway of the frontend is known to be up")
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

// sourceProblem says what is wrong with the sources, "" if nothing is.
func sourceProblem(states []sourceState) string {
	var problems []string
	for _, s := range states {
		if !s.Live {
			problems = append(problems, fmt.Sprintf("%s is gone (%s): %s", s.Name, s.OnGone, s.Detail))
		}
		if n := len(s.Problems); n > 0 {
			words := fmt.Sprintf("%s: %s", s.Name, s.Problems[0])
			if n > 1 {
				words += fmt.Sprintf(" (and %d more)", n-1)
			}
			problems = append(problems, words)
		}
	}
	return strings.Join(problems, "; ")
}
