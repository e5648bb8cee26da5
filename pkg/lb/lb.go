package lb

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	probev1 "github.com/vipgate/vipgate/pkg/api/probe/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/availability"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/feedback"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/localaddress"
	"github.com/vipgate/vipgate/pkg/metrics"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
)

// Options configure a load balancer. Every field is required unless stated otherwise.
type Options struct {
	shell.Settings
	// TrenchFile is watched; Config is its content at the start, nil if it was refused.
	TrenchFile string
	Defaults   trench.Defaults
	Config     *trench.Config

	Socket     string // where readiness is served over mTLS
	SocketMode fs.FileMode
	Identity   *identity.Source
	// Frontends may watch and report, Readers may watch and get. All members of FrontendDomain,
	// unless it is zero, may be the frontend, too.
	Frontends, Readers []spiffeid.ID
	FrontendDomain     spiffeid.TrustDomain

	Lease      time.Duration // how long every message to the frontend stays valid
	StaleGrace time.Duration // how long the data plane outlives this process
	DrainTime  time.Duration // how long traffic is forwarded after SIGTERM

	Targets TargetOptions

	// Probes may report verdicts, and ProbeQuorum of them must agree; none: they are not served.
	Probes      []spiffeid.ID
	ProbeQuorum int

	// DataPlane lacks StateDir, Log, OnRepair and Gateways, set here; nil: another process forwards.
	DataPlane *dataplane.Options
	// VIPInterface is the interface on which VIPs are local addresses while this host serves them; ""
	// for none. Only without DataPlane.
	VIPInterface string

	// Configured, if not nil, is called once, when the first accepted trench file is evaluated.
	// Targets have no verdict yet. It must not block.
	Configured func()
}

// TargetOptions are the sources of targets: the trench file, the registry, or both.
type TargetOptions struct {
	File       bool
	OnFileGone targetset.SourceGonePolicy
	// Registry lacks StateFile and Log, which are set here.
	Registry          registry.Options
	RegistrySettle    time.Duration  // of serving.Options
	RegistryAddr      string         // host:port for TCP with mTLS; empty: the readiness socket only
	Subnets           []netip.Prefix // where targets may be; none: anywhere
	StateDir          string         // where drains by operators and registrations survive a restart
	WriteReadinessDir string         // of readiness files that are written; empty for none
}

const (
	// BeatsPerLease is the least number of heartbeats per lease (docs/architecture.md#the-two-leases).
	BeatsPerLease = 3
	// maxBeat bounds the time between two heartbeats, and so until an evaluation finds an overdue
	// target or a stall of this process, for long leases.
	maxBeat = 500 * time.Millisecond
	// minLease is the shortest lease for which a busy node still sends the heartbeats in time.
	minLease = 20 * time.Millisecond
	// svidWait bounds how long clients wait for the first SVID. Then they are refused.
	svidWait = 3 * time.Second
	// maxSettle bounds the wait for first verdicts on targets.
	maxSettle = 5 * time.Second
	// endTimeout bounds the wait for readers to receive the end of their streams.
	endTimeout = time.Second
	// stopMargin is the frontend's time to withdraw (docs/architecture.md#stopping).
	stopMargin = 2 * time.Second
)

// ValidateLease refuses leases that heartbeats cannot keep alive.
func ValidateLease(lease time.Duration) error {
	if lease < minLease {
		return fmt.Errorf("lease %v is too short for %d heartbeats: use at least %v, 1s is the default",
			lease, BeatsPerLease, minLease)
	}
	if lease > readiness.MaxLease {
		return fmt.Errorf("lease %v is longer than %v, and a dead load balancer would attract traffic that long",
			lease, readiness.MaxLease)
	}
	return nil
}

// process holds the parts of one load balancer.
type process struct {
	Options
	shell   *shell.Process
	metrics *metrics.LB
	health  *health.Server
	config  *trenchfile.Watcher
	checker *healthcheck.Checker
	index   *targetset.Index
	sources *sources
	addrs   *kernel.Addresses
	files   *readinessfile.Writer // nil: none are written
	plane   *dataplane.Plane      // nil: there is none
	probes  *feedback.Feedback    // nil: none may report
	local   *localaddress.Plane   // nil: there is none
	table   *readiness.Table
	server  *readiness.Server
	// availability serves a frontend of Meridio 1.x on the same socket as server.
	availability *availability.Server
	decisions    *decisions // of loop
	observer     *observer
	loop         *loop
	changed      *latest.Value[uint64] // counts changes of the status

	gatewaySources gatewaySources
	stopping       *latest.Value[bool]
}

// Health services of the load balancer, in addition to "" and vip/<prefix>.
const (
	Liveness      = "Liveness"
	Readiness     = "Readiness" // Started, Identity and Serving; a problem of one VIP or source must not end the rest
	Egress        = "Egress"
	Configuration = "Configuration"
	Held          = "Held"       // no removal of the trench file waits for a confirmation
	TrenchFile    = "TrenchFile" // its writer refreshes it; no part of Readiness
	Started       = "Started"    // from when a trench file was accepted and every target had its first verdict
	Identity      = "Identity"
	Serving       = "Serving"

	ReadinessSocket        = "ReadinessSocket" // the socket file leads to lb
	SourcesCondition       = "Sources"
	ProbesCondition        = "Probes"        // serves without probes, too
	DataPlaneCondition     = "DataPlane"     // serves without a data plane, too
	DataPlaneHoldCondition = "DataPlaneHold" // nothing is held
)

// Run runs a load balancer until a receive from stop, and then stops it in stages: it notifies the
// frontend, serves until the frontend withdrew every VIP, and then tears down. A second receive
// skips to the end. The end of ctx ends everything immediately.
func Run(ctx context.Context, o Options, stop <-chan struct{}) error {
	p, err := newProcess(o)
	if err != nil {
		return err
	}
	return p.run(ctx, stop)
}

func newProcess(o Options) (*process, error) {
	p := &process{
		Options: o, metrics: metrics.NewLB(o.Version), addrs: kernel.NewAddresses(o.Log, nil), index: targetset.NewIndex(),
		config:  trenchfile.NewWatcher(o.TrenchFile, o.Defaults, o.Config, o.Log),
		table:   readiness.NewTable(readiness.TableOptions{Lease: o.Lease, StaleGrace: o.StaleGrace}),
		changed: latest.New(uint64(0)), stopping: latest.New(false),
	}
	p.config.Trial = o.Trial
	p.shell = shell.New(o.Settings, p.metrics)
	p.health = p.shell.Health
	p.health.Define(Readiness, Started, Identity, Serving)
	p.health.Set(Configuration, o.Config != nil, "the trench file was not accepted yet")
	// Set each condition before the listeners open: Check returns NotFound for an unset condition.
	for _, c := range [][2]string{
		{Identity, "no SVID yet"},
		{Serving, "the readiness socket is not served yet"},
		{Egress, "no frontend has reported yet"},
		{Liveness},
		{Held},
		{TrenchFile},
		{SourcesCondition},
		{ProbesCondition},
		{DataPlaneCondition},
		{DataPlaneHoldCondition},
	} {
		p.health.Report(c[0], c[1])
	}
	// The first of two aligned heartbeats may be an eighth later.
	checks := healthcheck.Options{
		Log: o.Log, Source: p.addrs.Source, Heartbeat: min(o.Lease/BeatsPerLease, maxBeat) * 9 / 8,
	}
	// A check through a VIP follows the route of its target, which only the data plane installs.
	if o.DataPlane != nil {
		checks.FWMark, checks.VIPSource, checks.LocalVIP = p.checkFWMark, p.checkSource, p.localVIP
	}
	p.checker = healthcheck.New(checks)
	p.config.Hold, p.config.Waits = p.hold, func() bool { return len(p.checker.Held()) > 0 }
	p.config.Resume()
	var err error
	if p.sources, err = newSources(o.Targets, o.Log); err != nil {
		return nil, err
	}
	if o.Targets.WriteReadinessDir != "" {
		p.files = readinessfile.NewWriter(o.Targets.WriteReadinessDir, o.Log)
	}
	p.server = readiness.NewServer(p.table, readiness.ServerOptions{
		Role: o.roles(), Peer: identity.PeerID, Log: o.Log,
	})
	// A frontend of Meridio accepts availability only with the host name of its own pod.
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("failed to read the host name for frontends of Meridio: %w", err)
	}
	p.availability = availability.NewServer(p.table, p.server, host, o.Log)
	// newObserver sets p.decisions, which the loop calls.
	p.observer = newObserver(p)
	p.loop = &loop{
		config: p.config.Value(), sources: p.sources, checker: p.checker, index: p.index,
		table: p.table, lease: o.Lease, log: o.Log, observe: p.decisions.decided, files: p.files,
		away: p.stopping, ready: make(chan struct{}), configured: o.Configured,
		evaluator: serving.New(serving.Options{
			// The frontend withdraws VIPs that are not synced within the grace period. Half of it is
			// left for the frontend to connect.
			Settle:         min(cmp.Or(o.StaleGrace/2, maxSettle), maxSettle),
			RegistrySettle: o.Targets.RegistrySettle, Restored: p.sources.registry.Restored,
			DataPlane: o.DataPlane != nil || o.VIPInterface != "", WithdrawTime: o.DrainTime + stopMargin,
		}),
	}
	p.loop.inForce.Store(p.config.Value().Load().Config)
	if o.Tracer != nil {
		p.loop.trace = p.trace
	}
	if len(o.Probes) > 0 {
		p.probes = feedback.New(feedback.Options{
			Probes: o.Probes, Quorum: o.ProbeQuorum, Log: o.Log, Changed: p.probeChanged,
		})
		p.loop.suspects = p.probes.Suspects()
		p.metrics.Probes(p.probeMetrics)
	}
	p.metrics.Targets(p.targetMetrics)
	if o.VIPInterface != "" {
		p.local = localaddress.New(o.VIPInterface, o.Log)
		p.withPlane(p.local)
	}
	if o.DataPlane == nil {
		return p, nil
	}
	o.DataPlane.StateDir, o.DataPlane.Log, o.DataPlane.OnRepair = o.Targets.StateDir, o.Log, p.dataPlaneRepaired
	o.DataPlane.Gateways = p.gateways
	if p.plane, err = dataplane.New(*o.DataPlane); err != nil {
		return nil, err
	}
	p.withPlane(p.plane)
	return p, nil
}

// withPlane connects the readiness loop with the data plane, or with local addresses.
func (p *process) withPlane(plane plane) {
	// Without a data plane the condition serves from the start, because another process forwards.
	p.health.Report(DataPlaneCondition, kernelNotRead)
	p.loop.withPlane(plane, p.server, p.metrics.DataPlane(p.dataPlaneMetrics))
}

// targetService serves the registry to callers with SPIFFE IDs, or to the operator.
func (p *process) targetService(operator bool) *registry.Service {
	return &registry.Service{
		Registry: p.sources.registry, Index: p.index, Operator: operator, Log: p.Log,
		Reader: p.readsTargets,
	}
}

// run opens the listeners and runs all tasks until they have stopped.
func (p *process) run(ctx context.Context, stop <-chan struct{}) error {
	defer p.shell.Close()
	creds := identity.NewCredentials(p.Identity, identity.CredentialOptions{Authorize: p.authorize(), Log: p.Log})
	if err := p.shell.Serve(p.readinessEndpoint(ctx, creds)); err != nil {
		return err
	}
	if p.Targets.RegistryAddr != "" {
		if err := p.shell.Serve(p.registryEndpoint(ctx, creds)); err != nil {
			return err
		}
	}
	err := p.shell.Listen(ctx, shell.Services{Audit: p.decisions.journal.Add, Admin: func(r grpc.ServiceRegistrar) {
		lbv1.RegisterLBServiceServer(r, newAdmin(p))
		adminv1.RegisterEventServiceServer(r, p.decisions.journal)
		adminv1.RegisterConfigurationServiceServer(r, endpoint.ConfigurationService{
			InForce: p.config.Value(), Confirm: p.config.Confirm, Log: p.Log, Audit: p.decisions.journal.Add,
		})
		// Only the same user and root can use the admin socket, so its callers act as the operator.
		targetv1.RegisterTargetServiceServer(r, p.targetService(true))
	}})
	if err != nil {
		return err
	}
	tasks := []task.Task{p.Identity, p.config, p.checker, p.loop, p.observer, p.sources.registry, p.addrs}
	if p.files != nil {
		tasks = append(tasks, p.files)
	}
	if p.plane != nil {
		tasks = append(tasks, p.plane)
	}
	if p.probes != nil {
		tasks = append(tasks, p.probes)
	}
	if p.local != nil {
		tasks = append(tasks, p.local)
	}
	// Readers receive the end of their streams while the loop still sends heartbeats.
	plan := shell.Plan{Decides: p.loop, Stages: [][]task.Task{nil, tasks}, Drain: p.drain}
	return p.decisions.runTasks(func() error { return p.shell.Run(ctx, stop, plan) })
}

func (p *process) readinessEndpoint(ctx context.Context, creds credentials.TransportCredentials) (*endpoint.Endpoint,
	error,
) {
	listener, err := identity.Listen(ctx, identity.ListenOptions{
		Path: p.Socket, Mode: p.SocketMode, Watch: p.health.Reporter(ReadinessSocket),
	})
	if err != nil {
		return nil, fmt.Errorf("readiness socket: %w", err)
	}
	options, connections := readiness.GRPCOptions(), endpoint.MaxConnections
	// Each registered application keeps a connection to this socket.
	if !p.Targets.Registry.Off {
		connections = endpoint.MaxRegistryConnections
		// Each Register is a stream; calls beyond the limit of a connection wait silently.
		options = append(options, grpc.MaxConcurrentStreams(registry.MaxCallsPerConnection))
	}
	listeners := []net.Listener{endpoint.Limit(listener, connections, p.isFrontend)}
	e := endpoint.NewMutual("readiness socket", listeners, p.metrics, creds, options,
		func(r grpc.ServiceRegistrar) {
			readinessv1.RegisterReadinessServiceServer(r, p.server)
			loadbalancerv1.RegisterStreamAvailabilityServiceServer(r, p.availability)
			targetv1.RegisterTargetServiceServer(r, p.targetService(false))
			p.health.Register(r)
		})
	e.Begin, e.End = p.awaitReadiness, p.endWatches
	return e, nil
}

// registryEndpoint returns the endpoint of the registry over TCP.
func (p *process) registryEndpoint(ctx context.Context, creds credentials.TransportCredentials) (*endpoint.Endpoint,
	error,
) {
	listeners, err := endpoint.ListenTCP(ctx, p.Targets.RegistryAddr, endpoint.MaxRegistryConnections, false)
	if err != nil {
		return nil, fmt.Errorf("--registry-address: %w", err)
	}
	return endpoint.NewMutual("registry", listeners, p.metrics, creds, registry.GRPCOptions(),
		func(r grpc.ServiceRegistrar) {
			targetv1.RegisterTargetServiceServer(r, p.targetService(false))
			if p.probes != nil {
				probev1.RegisterProbeServiceServer(r, p.probes)
			}
			p.health.Register(r)
		}), nil
}

// awaitReadiness waits until readiness may be served: after the first evaluation is committed, and
// for the first SVID at most svidWait. Without an SVID every client is refused and has to retry.
func (p *process) awaitReadiness(ctx context.Context) error {
	select {
	case <-p.Identity.Ready():
	case <-time.After(svidWait):
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-p.loop.Ready():
	case <-ctx.Done():
		return ctx.Err()
	}
	p.health.Report(Serving, "")
	p.Log.Info("serving readiness", "socket", p.Socket, "trench", p.config.Value().Load().Config.Trench,
		"lease", p.Lease, "instance_id", p.table.Position().InstanceID)
	return nil
}

// endWatches ends the streams of all readers.
func (p *process) endWatches() {
	p.health.Report(Serving, "stopping")
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	if err := p.server.EndWatches(ctx); err != nil {
		p.Log.Warn("a reader did not take the end of its stream; closing its connection", "error", err)
	}
}
