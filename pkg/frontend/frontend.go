package frontend

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/pkg/announce"
	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/drains"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/frontend/directory"
	"github.com/vipgate/vipgate/pkg/frontend/orders"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench/change"
	"github.com/vipgate/vipgate/pkg/vip"
)

// process holds the parts of one frontend.
type process struct {
	Options
	shell      *shell.Process
	metrics    *metrics.Frontend
	health     *health.Server
	parts      []string // of Readiness, without Started
	kernel     *kernel.Routing
	bird       bgpSpeaker
	announcer  *announce.Announcer
	source     readinessSource    // nil without gating: watcher or directory
	watcher    *readiness.Watcher // nil unless the source is a load balancer
	directory  *directory.Source  // nil unless the source is a directory
	reader     *readinessfile.Reader
	controller *controller
	observer   *observer
	reporter   *reporter
	attractor  *attractor
	drains     *drains.Drains[orders.Object]
	elsewhere  latest.Value[orders.Elsewhere]
	changed    *latest.Value[uint64] // counts changes of the status
	immediate  chan chan<- []vip.VIP // requests to apply all changes now; answered with the leaving VIPs
	stopping   atomic.Bool
	reported   atomic.Bool // the watcher has a report of VIPs
	applied    *latest.Value[readiness.Position]
	instance   string                       // of this start; events are numbered within it
	served     atomic.Pointer[[]vip.Family] // that have VIPs
}

// Health services of the frontend, in addition to "" and vip/<prefix>. Readiness is a conjunction.
const (
	Liveness  = "Liveness"
	Readiness = "Readiness"
	Egress    = "Egress"
	// Configuration holds while all of its source's configuration is in force; not part of Readiness.
	Configuration = "Configuration"
	// Held holds while no removal of the configuration waits for confirmation; not part of Readiness.
	Held = "Held"
	// HeldTargets holds while the load balancer holds no removal of targets; not part of Readiness.
	HeldTargets = "HeldTargets"
	// TrenchFile holds while the writer of the trench file refreshes it; not part of Readiness. Other
	// sources of the configuration have other names.
	TrenchFile = "TrenchFile"
	// Started holds once a configuration was accepted and every VIP that the load balancer reports as
	// ready was advertised, or ReadyTimeout expired; then it never changes again. Readiness requires
	// it. Advertised is the same condition without the timeout, and not part of Readiness.
	Started    = "Started"
	Advertised = "Advertised"
	Identity   = "Identity"
	BIRD       = "BIRD"
	BIRDConfig = "BIRDConfiguration"
	// Announcer holds while BIRD accepts VIPs: the loopback session is up, or down for less than one
	// reconnect.
	Announcer = "Announcer"
	Stream    = "Stream"
	Routing   = "SourceRouting"
	Stopping  = "NotStopping"
	// HealthSocket holds while the socket file belongs to this process; not part of Readiness.
	HealthSocket = "HealthSocket"
	// Imports holds while BIRD ignores no route of a gateway; not part of Readiness.
	Imports = "Imports"
	// GatewayChange holds unless a changed session did not come back; not part of Readiness.
	GatewayChange = "GatewayChange"
	// RouteBack, by family, holds while a gateway advertises a route. It is not part of Readiness,
	// because other pods have the same gateways.
	RouteBack = "RouteBack"
)

// Run runs a frontend until a receive from stop, and then stops it in stages: it moves traffic
// away, reports to the load balancer, and terminates BIRD last. A second receive skips to the
// end. Cancelling ctx skips all stages.
func Run(ctx context.Context, o Options, stop <-chan struct{}) error {
	p, err := newProcess(o)
	if err != nil {
		return err
	}
	return p.run(ctx, stop)
}

func newProcess(o Options) (*process, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.BIRD.Log, o.InForce = o.Log, cmp.Or(o.InForce, latest.New(&change.InForce{}))
	p := &process{
		Options: o, metrics: metrics.NewFrontend(o.Version), changed: latest.New(uint64(0)),
		immediate: make(chan chan<- []vip.VIP),
		applied:   latest.New(readiness.Position{}), instance: rand.Text(),
		parts: []string{BIRD, BIRDConfig, Announcer, Egress, Stopping},
	}
	p.Kernel.External, p.Kernel.Log = p.external, o.Log
	p.kernel = kernel.New(p.Kernel)
	p.metrics.State(p.metricsState)
	p.shell = shell.New(o.Settings, p.metrics)
	p.health = p.shell.Health
	p.health.Set(Liveness, true, "")
	loaded := p.Source.Value().Load()
	p.health.Set(Configuration, loaded.Generation > 0 && loaded.Err == nil,
		cmp.Or(logs.Text(loaded.Err), p.SourceName+" not accepted yet"))
	p.health.Report(Held, loaded.Held.Problem())
	p.health.Report(p.StaleCondition, p.Source.Stale().Load().Problem(time.Now()))
	// BIRD has not refused a configuration yet, and this process does not stop yet.
	p.health.Set(BIRDConfig, true, "")
	p.health.Set(Stopping, true, "")
	// Set each condition before the listeners open: Check returns NotFound for an unset condition.
	p.health.Report(Egress, "no gateway session is up yet")
	p.health.Report(BIRD, "no answer from "+o.speakerName()+" yet")
	p.health.Report(Announcer, "no session with "+o.speakerName()+" yet")
	p.health.Report(Routing, "source routing not installed yet")
	p.observer = newObserver(o.Log, p.instance, p.count, p.mayHave)
	p.metrics.VIPs(p.observer.metrics)
	p.health.ServeVIPs(p.observer.state.serves)
	p.metrics.Registry().MustRegister(o.Collectors...)
	// Reports of decisions need the families before the follower runs.
	p.setInForce(p.InForce.Load().Next(loaded, nil, !o.Gate.Ungated))
	switch {
	// Only a source in use is part of Readiness: without a load balancer, Identity would never serve.
	case o.Gate.Ungated:
		o.Log.Warn("gating is off: VIPs are advertised regardless of the load balancer")
	case o.Directory != nil:
		p.observer.sourceName = "readiness directory"
		p.health.Report(Stream, "readiness directory "+o.Directory.Path+" not read yet")
		p.parts = append(p.parts, Stream)
		if o.Directory.MaxAge == 0 {
			o.Log.Warn("readiness files have no lease: files of a writer that died stay valid; see --readiness-max-age",
				"directory", o.Directory.Path)
		}
		p.reader = readinessfile.NewReader(*o.Directory)
		p.directory = directory.New(p.reader, p.InForce, p.Gate.DrainTime, p.instance)
		p.source = p.directory
	default:
		p.health.Report(Identity, "no SVID yet")
		p.health.Report(Stream, "no readiness from the load balancer yet")
		p.parts = append(p.parts, Identity, Stream)
		p.watcher = p.newWatcher(loaded.Config.Attractor.Name)
		p.source = p.watcher
	}
	p.health.Define(Readiness, append([]string{Started}, p.parts...)...)

	var session announce.Options
	p.bird, session = p.newSpeaker(o)
	session.Log = o.Log
	session.OnWritten = func(cause, at time.Time, _ uint64) {
		if !cause.IsZero() {
			p.metrics.DecisionLatency(at.Sub(cause))
		}
	}
	p.announcer = announce.New(session)
	p.reporter = newReporter(p.announcer.State(), p.bird, o.Settle, p.report)
	// Report before waking the watches: the load balancer waits for withdrawals.
	p.observer.onDecisions = func(d decisions) {
		p.reporter.decided(d)
		p.health.VIPsChanged()
	}
	p.observer.onApplied, p.observer.causes = p.reportApplied, causes{reason: p.reasonDetail, shared: p.sharedDetail}
	p.reporter.shared = p.shared
	p.reporter.detection = p.detectionTime
	p.attractor = &attractor{all: o.StaticAll, current: latest.New(attraction{}), apply: p.bird.Attract}
	var err error
	if p.drains, err = orders.Open(o.BIRD.Dir, o.Log); err != nil {
		return nil, err
	}
	// Drains of the previous process are in force before the first VIP is configured.
	decides := gate.New(o.Gate)
	p.applyDrains(decides, time.Now())
	// Last, because the controller needs the state of every other part.
	p.controller = &controller{
		gate: decides, source: p.source, bird: p.bird.State(), kernel: p.kernel.Confirmed(),
		announcer: p.announcer, session: p.announcer.Up(), observer: p.observer,
		requireRoute: o.RequireRoute, attractor: p.attractor,
		commands: make(chan command), ready: make(chan struct{}),
	}
	if o.Tracer != nil {
		p.controller.tracer = &tracer{o.Tracer, p.instance, p.announcer.State(), p.reporter.confirm}
	}
	return p, nil
}

// external returns the name of the interface toward the gateways.
func (p *process) external() string { return p.Source.Value().Load().Config.Attractor.Interface }

// loopbackPassword returns a TCP-MD5 key for the loopback session, because every process in the
// pod can connect to 127.0.0.1. It returns "" if the kernel lacks TCP-MD5.
func loopbackPassword(o Options) string {
	if err := announce.ProbeMD5(); err != nil {
		o.Log.Warn("kernel has no TCP-MD5: session to BIRD on 127.0.0.1 is not signed", "error", err)
		return ""
	}
	return announce.NewPassword()
}

// isExternal reports whether the interface toward the gateways has the address. Metrics are not
// served to the external network, even if the listener is bound to the wildcard address.
func (p *process) isExternal(a netip.Addr) bool {
	link, err := net.InterfaceByName(p.external())
	if err != nil {
		return false // a missing interface receives no connections
	}
	addresses, err := link.Addrs()
	return err != nil || slices.ContainsFunc(addresses, func(n net.Addr) bool {
		prefix, err := netip.ParsePrefix(n.String())
		return err == nil && prefix.Addr() == a.Unmap().WithZone("")
	})
}

// run opens the listeners and runs all tasks until they have stopped.
func (p *process) run(ctx context.Context, stop <-chan struct{}) error {
	defer p.shell.Close()
	// All listeners open before the first task, so that a port or socket in use fails the start.
	if p.Options.HealthSocket != "" {
		err := p.shell.Serve(endpoint.NewPlainSocket(ctx, "health socket", p.Options.HealthSocket, p.metrics,
			p.health.Reporter(HealthSocket), p.health.RegisterForContainer))
		if err != nil {
			return err
		}
	}
	err := p.shell.Listen(ctx, shell.Services{
		Admin: func(r grpc.ServiceRegistrar) {
			frontendv1.RegisterFrontendServiceServer(r, newAdmin(p))
			adminv1.RegisterEventServiceServer(r, p.observer.journal)
			adminv1.RegisterConfigurationServiceServer(r, endpoint.ConfigurationService{
				InForce: p.Source.Value(), Confirm: p.Source.Confirm, Log: p.Log, Audit: p.observer.journal.Add,
			})
		},
		MetricsRefused: p.isExternal, Signals: p.Signals, Audit: p.observer.journal.Add,
	})
	if err != nil {
		return err
	}
	config := p.Source.Value().Load().Config
	vips, gateways := len(config.Attractor.VIPs), len(config.Attractor.Gateways)
	p.Log.Info("starting frontend", "version", p.Version, "trench", config.Trench, "attractor", config.Attractor.Name,
		"vips", vips, "gateways", gateways, "gating", !p.Gate.Ungated)
	p.observer.note(fmt.Sprintf("frontend %s is starting, with %d VIPs and %d gateways", p.Version, vips, gateways))
	front := append([]task.Task{
		p.Source, p.controller, p.observer, p.reporter, p.announcer, &follower{process: p, departed: map[vip.VIP]time.Time{}},
	}, p.Tasks...)
	if p.Identity != nil {
		front = append(front, p.Identity)
	}
	if p.watcher != nil {
		front = append(front, p.watcher)
	}
	if p.directory != nil {
		front = append(front, p.reader, p.directory)
	}
	// BIRD and source routing end after the announcer has closed its session.
	back := []task.Task{p.kernel, &birdAfterRouting{p}}
	if p.External != nil {
		if follower, ok := p.External.View.(task.Task); ok {
			back = append(back, follower)
		}
	}
	if !p.Kernel.Foreign {
		back = append(back, kernel.NewAddresses(p.Log, p.external))
	}
	err = p.shell.Run(ctx, stop, shell.Plan{
		Decides: p.controller, Stages: [][]task.Task{front, back}, Drain: p.drain,
	})
	// ctx may have ended, and the tasks no longer repair the kernel state.
	if p.RemoveRulesOnExit {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, kernel.Cleanup(cleanup, p.Kernel), bfdlease.Cleanup(cleanup))
	}
	return err
}

// birdAfterRouting starts BIRD after source routing is installed, because an advertised VIP
// attracts traffic immediately.
type birdAfterRouting struct{ *process }

func (b *birdAfterRouting) String() string { return b.bird.String() }

func (b *birdAfterRouting) Overdue() time.Duration { return b.bird.Overdue() }

func (b *birdAfterRouting) Run(ctx context.Context) error {
	select {
	case <-b.kernel.Ready():
		return b.bird.Run(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// count counts the VIPs of a decision with the same transition.
func (p *process) count(t journal.Transition, vips int) {
	p.metrics.Count(metrics.Transition{
		Family: t.Family, To: t.To, Reason: t.Reason, Changed: t.Changed(), Removed: t.Reason == gate.NotConfigured.String(),
	}, vips)
}

// mayHave reports whether a VIP is in the attractor. Without a configuration, every VIP may be.
func (p *process) mayHave(v vip.VIP) bool {
	loaded := p.Source.Value().Load()
	return loaded.Generation == 0 || slices.Contains(loaded.Config.Attractor.VIPs, v)
}

// report passes the reporter's reports to the watcher.
func (p *process) report(reports []reported) {
	if p.watcher == nil {
		return
	}
	d := readiness.ReportDelta{
		Applied: p.applied.Load(), Families: p.families(), VIPs: make([]readiness.ReportedVIP, 0, len(reports)),
	}
	for _, r := range reports {
		// The load balancer forgets VIPs that left the attractor.
		if r.Reason == gate.NotConfigured {
			d.Removed = append(d.Removed, r.VIP)
			continue
		}
		d.VIPs = append(d.VIPs, readiness.ReportedVIP{VIP: r.VIP, VIPReport: readiness.VIPReport{
			Advertisement: advertisements[r.Advertisement], Reason: reasons[r.Reason],
			Unconfirmed: r.Unconfirmed,
		}})
	}
	p.watcher.Report(d)
	// After the report: positions and families may follow it now.
	p.reported.Store(true)
}

// reportApplied reports the position up to which all decisions were reported. It sends nothing
// before the first report of VIPs.
func (p *process) reportApplied(position readiness.Position) {
	p.applied.Set(position)
	if p.watcher != nil && p.reported.Load() {
		p.watcher.Report(readiness.ReportDelta{Applied: position})
	}
}

// metricsState returns the state of the frontend for a scrape.
func (p *process) metricsState() metrics.FrontendState {
	m := metrics.FrontendState{
		Sessions: p.announcer.State().Load().Sessions, Repairs: uint64(p.kernel.Confirmed().Load().Repairs),
		BIRD: p.birdMetrics(p.bird.State().Load()),
	}
	if !p.Gate.Ungated {
		lease := p.observer.lease.Load()
		var stats readiness.Stats // all zero for a directory
		if p.watcher != nil {
			stats = p.watcher.Stats()
		}
		m.Stream = &metrics.Stream{
			Live: p.observer.lb.Load().Freshness == gate.Live, LeaseEnd: lease.End, LastMessage: lease.LastMessage,
			Reconnects: stats.Reconnects(), Moves: stats.Moves,
		}
	}
	return m
}

// birdMetrics returns the metrics of BIRD and its gateways, which are down if BIRD does not answer.
func (p *process) birdMetrics(b bird.State) metrics.BIRD {
	m := metrics.BIRD{
		Up: b.Alive, Restarts: uint64(b.Restarts), Configures: b.Configures,
		Configured: b.ConfigErr == nil, Refusals: b.ConfigFailures, Restores: b.Restores,
	}
	advertised := p.observer.state.expected()
	for _, g := range b.Gateways {
		m.Gateways = append(m.Gateways, metrics.Gateway{
			Name: g.Name, Family: g.Family.String(), Up: g.Up && b.Alive, Held: g.Held, Since: g.Since,
			Imported: g.Imported, ImportsBlocked: g.ImportsBlocked, Exported: g.Exported, Expected: expectedOf(g, advertised),
		})
	}
	return m
}

// families returns the external connectivity of the families that have VIPs.
func (p *process) families() map[vip.Family]bool {
	up := gateways(p.bird.State().Load(), false).Up
	families := map[vip.Family]bool{}
	for _, f := range *p.served.Load() {
		families[f] = up[f]
	}
	return families
}

// setInForce publishes the VIPs in force, and stores their families, which every report of
// decisions contains.
func (p *process) setInForce(inForce *change.InForce) {
	served := slices.DeleteFunc(slices.Clone(vip.Families[:]), func(f vip.Family) bool {
		return !slices.ContainsFunc(inForce.Attractor.VIPs, func(v vip.VIP) bool { return v.Family() == f })
	})
	p.served.Store(&served)
	p.InForce.Set(inForce)
}

func (p *process) newWatcher(reader string) *readiness.Watcher {
	return readiness.NewWatcher(readiness.WatcherOptions{
		Target: p.LBSocket, Credentials: p.Credentials, ConnectionEnd: identity.ConnectionEnd,
		Rotation: func() (uint64, <-chan struct{}) {
			s, changed := p.Identity.Status().Get()
			return s.Rotations, changed
		},
		Fallback: p.Fallback, Reader: reader, MaxBackoff: p.MaxBackoff, Log: p.Log,
		Consume: func() bool { return p.controller.tryUpdate() },
	})
}

// sharesState reports whether a load balancer's service has one state for all VIPs, as Meridio 1.x.
func sharesState(service string) bool { return service != "" && service != readiness.Service }
