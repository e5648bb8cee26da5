package lb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/availability"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
)

// Options configure a load balancer. Every field is required unless stated otherwise.
type Options struct {
	Version string
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
	MaxStreamsPerPeer  int

	// HealthAddr and MetricsAddr are host:port; an empty MetricsAddr serves none.
	AdminSocket, HealthAddr, MetricsAddr string

	Lease      time.Duration // how long every message to the frontend stays valid
	StaleGrace time.Duration // how long the data plane outlives this process
	DrainTime  time.Duration // how long traffic is forwarded after SIGTERM

	Targets TargetOptions

	// DataPlane lacks StateDir, Log, OnRepair and Gateways, set here; nil: another process forwards.
	DataPlane       *dataplane.Options
	RemoveDataPlane bool // at the end of an orderly stop; otherwise it stays for the next start

	// Configured, if not nil, is called once, when the first accepted trench file is evaluated.
	// Targets have no verdict yet. It must not block.
	Configured func()

	Log   *slog.Logger
	Level *logs.Level
	// LostLines returns the number of lines of the log that were lost since the start.
	LostLines func() uint64
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
	// BeatsPerLease is how many heartbeats go into one lease (docs/architecture.md#the-two-leases).
	BeatsPerLease = 3
	// minLease is the shortest lease for which a busy node still sends the heartbeats in time.
	minLease = 20 * time.Millisecond
	// svidWait bounds how long clients wait for the first SVID. After that they are refused, with the
	// reason.
	svidWait = 3 * time.Second
	// maxSettle bounds the wait for first verdicts on targets.
	maxSettle = 5 * time.Second
	// cleanupTimeout bounds the removal of the data plane at the end.
	cleanupTimeout = 10 * time.Second
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
	metrics *metrics.LB
	health  *health.Server
	config  *trench.Watcher
	checker *healthcheck.Checker
	index   *targetset.Index
	sources *sources
	addrs   *kernel.Addresses
	files   *readinessfile.Writer // nil: none are written
	plane   *dataplane.Plane      // nil: there is none
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
	TrenchFile    = "TrenchFile" // its writer refreshes it; no part of Readiness
	Started       = "Started"    // from when a trench file was accepted and every target had its first verdict
	Identity      = "Identity"
	Serving       = "Serving"

	ReadinessSocket        = "ReadinessSocket" // the socket file leads to lb
	AdminSocket            = "AdminSocket"     // its socket file leads to lb
	SourcesCondition       = "Sources"
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
		config:  trench.NewWatcher(o.TrenchFile, o.Defaults, o.Config, o.Log),
		table:   readiness.NewTable(readiness.TableOptions{Lease: o.Lease, StaleGrace: o.StaleGrace}),
		changed: latest.New(uint64(0)), stopping: latest.New(false),
	}
	p.health = health.New(o.Log, p.metrics.Health)
	p.health.Define(Readiness, Started, Identity, Serving)
	p.health.Set(Configuration, o.Config != nil, "the trench file was not accepted yet")
	for _, c := range [][2]string{
		{Identity, "no SVID yet"},
		{Serving, "the readiness socket is not served yet"},
		{Egress, "no frontend has reported yet"},
		{Liveness},
		{TrenchFile},
		{SourcesCondition},
		{DataPlaneCondition},
		{DataPlaneHoldCondition},
	} {
		p.health.Report(c[0], c[1])
	}
	checks := healthcheck.Options{Log: o.Log, Source: p.addrs.Source}
	if o.DataPlane != nil {
		checks.FWMark, checks.VIPSource, checks.LocalVIP = p.checkFWMark, p.checkSource, p.localVIP
	}
	p.checker = healthcheck.New(checks)
	var err error
	if p.sources, err = newSources(o.Targets, o.Log); err != nil {
		return nil, err
	}
	if o.Targets.WriteReadinessDir != "" {
		p.files = readinessfile.NewWriter(o.Targets.WriteReadinessDir, o.Log)
	}
	role := o.roles()
	p.server = readiness.NewServer(p.table, readiness.ServerOptions{
		Role: role, Peer: identity.PeerID, MaxStreamsPerPeer: o.MaxStreamsPerPeer, Log: o.Log,
	})
	host, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("failed to read the host name for frontends of Meridio: %w", err)
	}
	p.availability = availability.NewServer(p.table, availability.ServerOptions{
		Host: host, Role: role, Peer: identity.PeerID, MaxStreamsPerPeer: o.MaxStreamsPerPeer, Log: o.Log,
	})
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
			DataPlane: o.DataPlane != nil, WithdrawTime: o.DrainTime + stopMargin,
		}),
	}
	p.metrics.Targets(p.targetMetrics)
	p.metrics.LostLines(o.LostLines)
	if o.DataPlane == nil {
		return p, nil
	}
	o.DataPlane.StateDir, o.DataPlane.Log, o.DataPlane.OnRepair = o.Targets.StateDir, o.Log, p.dataPlaneRepaired
	o.DataPlane.Gateways = p.gateways
	if p.plane, err = dataplane.New(*o.DataPlane); err != nil {
		return nil, err
	}
	p.health.Report(DataPlaneCondition, kernelNotRead)
	p.loop.withPlane(p.plane, p.server, p.metrics.DataPlane(p.dataPlaneMetrics))
	return p, nil
}

// targetService serves the registry to callers with SPIFFE IDs, or to the operator.
func (p *process) targetService(operator bool) *registry.Service {
	return &registry.Service{
		Registry: p.sources.registry, Index: p.index, Operator: operator, Log: p.Log,
		Reader: p.readsTargets,
	}
}

// run starts all tasks and stops them in order.
func (p *process) run(ctx context.Context, stop <-chan struct{}) (err error) {
	listener, err := identity.Listen(ctx, identity.ListenOptions{
		Path: p.Socket, Mode: p.SocketMode, Watch: p.health.Reporter(ReadinessSocket),
	})
	if err != nil {
		return fmt.Errorf("readiness socket: %w", err)
	}
	// The server closes it, too, and drops the error; each Close returns it.
	defer func() {
		if e := listener.Close(); e != nil {
			err = errors.Join(err, fmt.Errorf("failed to close the readiness socket: %w", e))
		}
	}()
	creds := identity.NewCredentials(p.Identity, identity.CredentialOptions{Authorize: p.authorize(), Log: p.Log})
	options := slices.Concat(readiness.GRPCOptions(), p.metrics.ServerOptions(), []grpc.ServerOption{grpc.Creds(creds)})
	connections := endpoint.MaxConnections
	if !p.Targets.Registry.Off {
		connections = endpoint.MaxRegistryConnections
		// Each Register is a stream; calls beyond the limit of a connection wait silently.
		options = append(options, grpc.MaxConcurrentStreams(registry.MaxCallsPerConnection))
	}
	server := grpc.NewServer(options...)
	readinessv1.RegisterReadinessServiceServer(server, p.server)
	loadbalancerv1.RegisterStreamAvailabilityServiceServer(server, p.availability)
	targetv1.RegisterTargetServiceServer(server, p.targetService(false))
	p.health.Register(server)
	reflection.Register(server)
	p.metrics.Serves(server)

	// An endpoint that runs closes itself: after a call that hangs, Close would wait for it.
	var unused []*endpoint.Endpoint
	defer func() {
		for _, e := range unused {
			e.Close()
		}
	}()
	adminEndpoint, err := endpoint.NewAdmin(ctx, p.AdminSocket, p.Log, p.metrics, p.health.Reporter(AdminSocket),
		func(r grpc.ServiceRegistrar) {
			lbv1.RegisterLBServiceServer(r, newAdmin(p))
			adminv1.RegisterEventServiceServer(r, p.decisions.journal)
			adminv1.RegisterLogServiceServer(r, endpoint.LogService{Level: p.Level, Log: p.Log})
			targetv1.RegisterTargetServiceServer(r, p.targetService(true))
			p.health.Register(r)
		})
	if err != nil {
		return err
	}
	unused = append(unused, adminEndpoint)
	healthEndpoint, err := endpoint.NewPlain(ctx, "health", p.HealthAddr, p.metrics, p.health.Register)
	if err != nil {
		return err
	}
	unused = append(unused, healthEndpoint)
	tasks := []task.Task{
		p.Identity, p.config, p.checker, p.loop, adminEndpoint, healthEndpoint, p.observer,
		logs.NewSignals(p.Level, p.Log), p.sources.registry, p.addrs,
	}
	if p.files != nil {
		tasks = append(tasks, p.files)
	}
	if p.plane != nil {
		tasks = append(tasks, p.plane)
	}
	if p.Targets.RegistryAddr != "" {
		e, err := endpoint.NewMutual(ctx, "registry", p.Targets.RegistryAddr, p.metrics, creds, registry.GRPCOptions(),
			func(r grpc.ServiceRegistrar) {
				targetv1.RegisterTargetServiceServer(r, p.targetService(false))
				p.health.Register(r)
			})
		if err != nil {
			return err
		}
		unused = append(unused, e)
		tasks = append(tasks, e)
	}
	if p.MetricsAddr != "" {
		listeners, err := endpoint.ListenTCP(ctx, p.MetricsAddr, endpoint.MaxConnections, true)
		if err != nil {
			return fmt.Errorf("--metrics-port: %w", err)
		}
		tasks = append(tasks, metrics.NewServer(listeners, p.metrics.Registry(), p.Log))
	}
	p.health.Alive(p.loop, tasks...)

	unused = nil
	// The tasks outlive ctx until the watches have ended.
	tasksCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	var wg sync.WaitGroup
	var tasksErr error
	failed := make(chan struct{})
	wg.Go(func() {
		defer close(failed)
		tasksErr = p.decisions.runTasks(tasksCtx, tasks...)
	})
	// Serve only after the first evaluation is committed, and wait up to svidWait for the first SVID:
	// without an SVID every client is refused and has to retry.
	served := make(chan error, 1)
	wg.Go(func() {
		select {
		case <-p.Identity.Ready():
		case <-time.After(svidWait):
		case <-tasksCtx.Done():
		}
		select {
		case <-p.loop.Ready():
			p.health.Report(Serving, "")
			p.Log.Info("serving readiness", "socket", p.Socket, "trench", p.config.Value().Load().Config.Trench,
				"lease", p.Lease, "instance_id", p.table.Position().InstanceID)
			served <- server.Serve(endpoint.Limit(listener, connections))
		case <-tasksCtx.Done():
			served <- nil
		}
	})

	var serveErr error
	withdrawn := false
	select {
	case <-ctx.Done():
	case <-failed:
	case serveErr = <-served:
		serveErr = fmt.Errorf("serve readiness: %w", serveErr)
	case <-stop:
		p.stop(ctx, stop)
		withdrawn = true
	}
	p.health.Report(Serving, "stopping")
	// Readers must receive the end of their streams even if ctx has ended.
	end, cancelEnd := context.WithTimeout(context.Background(), time.Second)
	defer cancelEnd()
	var ends [2]error
	var ending sync.WaitGroup
	ending.Go(func() { ends[0] = p.server.EndWatches(end) })
	ending.Go(func() { ends[1] = p.availability.EndWatches(end) })
	ending.Wait()
	if err := errors.Join(ends[:]...); err != nil {
		p.Log.Warn("a reader did not take the end of its stream; closing its connection", "error", err)
	}
	p.health.Shutdown()
	server.Stop()
	cancel()
	wg.Wait()
	// After a failure the frontend may still advertise VIPs, so only an orderly stop removes the data
	// plane.
	if p.plane == nil || !p.RemoveDataPlane || !withdrawn {
		return errors.Join(serveErr, tasksErr)
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	removed, err := dataplane.Cleanup(cleanup, *p.DataPlane)
	if err != nil {
		err = fmt.Errorf("failed to remove the data plane, after %d objects: %w", len(removed), err)
	} else {
		p.Log.Info("removed the data plane", "objects", len(removed))
	}
	return errors.Join(serveErr, tasksErr, err)
}
