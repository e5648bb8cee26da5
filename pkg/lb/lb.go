package lb

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/dataplane"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
)

// Options configure a load balancer. Every field is needed unless said otherwise.
type Options struct {
	Version string
	// TrenchFile is watched; Config is what was read from it at the start. Nil: it was
	// refused, and there are no VIPs until it is accepted.
	TrenchFile string
	Defaults   trench.Defaults
	Config     *trench.Config

	// Socket is where readiness is served over mTLS, with mode SocketMode.
	Socket     string
	SocketMode fs.FileMode
	Identity   *identity.Source
	// Frontends may watch and report, Readers may watch and get.
	Frontends, Readers []spiffeid.ID
	// FrontendDomain is a trust domain whose members may all be the frontend; zero
	// for exact IDs.
	FrontendDomain    spiffeid.TrustDomain
	MaxStreamsPerPeer int

	AdminSocket string
	// HealthAddr and MetricsAddr are host:port; an empty MetricsAddr serves none.
	HealthAddr, MetricsAddr string

	// Lease is how long every message to the frontend stays valid.
	Lease time.Duration
	// StaleGrace is how long the data plane outlives this process.
	StaleGrace time.Duration
	// DrainTime is how long traffic is forwarded after SIGTERM.
	DrainTime time.Duration

	Targets TargetOptions

	// DataPlane says how packets are forwarded; nil: not by us. Its StateDir and Log
	// are ours.
	DataPlane *dataplane.Options
	// RemoveDataPlane removes it at the end of an orderly stop, after the withdrawal.
	// Otherwise it stays for the next start.
	RemoveDataPlane bool

	Log   *slog.Logger
	Level *logs.Level
}

// Sources says which sources are in use, at least one.
type Sources struct{ File, Registry bool }

// TargetOptions say where targets come from.
type TargetOptions struct {
	Sources Sources
	// OnFileGone and OnRegistryGone are the answers to "the source is gone".
	OnFileGone, OnRegistryGone targetset.GonePolicy
	// Subnets are where targets may be; none: anywhere.
	Subnets []netip.Prefix
	// StateDir is where drains by operators and registrations survive a restart.
	StateDir string

	// Allow, Quota and Grace are those of the registry; RegistryAddr is host:port
	// where it is served over TCP, with mTLS; empty for the readiness socket only.
	Allow        registry.Allowances
	Quota        int
	Grace        time.Duration
	RegistryAddr string

	// WriteReadinessDir is the directory of the readiness files that are written; empty
	// for none.
	WriteReadinessDir string

	Outage outage.Options
}

// MinBeatsPerLease is how many heartbeats a lease must hold (docs/architecture.md#the-two-leases).
const MinBeatsPerLease = 4

// settleTime bounds the wait for first verdicts on targets. What a load balancer that
// restarts has not said by the end of its grace period is withdrawn, and its frontend
// needs some of that time to connect.
func settleTime(grace time.Duration) time.Duration {
	const longest = 5 * time.Second
	if grace > 0 {
		return min(grace/2, longest)
	}
	return longest
}

// svidWait bounds how long clients wait for the first SVID in place of a refusal, which
// explains more than a handshake that does not end.
const svidWait = 3 * time.Second

// minBeat is the shortest heartbeat that a busy node still keeps.
const minBeat = 5 * time.Millisecond

// ValidateLease refuses leases that heartbeats cannot keep alive.
func ValidateLease(lease time.Duration) error {
	if lease < MinBeatsPerLease*minBeat {
		return fmt.Errorf("lease %v is shorter than %d heartbeats of %v: use at least %v, 1s is the default",
			lease, MinBeatsPerLease, minBeat, MinBeatsPerLease*minBeat)
	}
	if lease > readiness.MaxLease {
		return fmt.Errorf("lease %v is longer than %v, and a dead load balancer would attract traffic that long", lease, readiness.MaxLease)
	}
	return nil
}

// process holds the parts of one load balancer.
type process struct {
	Options
	metrics  *metrics.LB
	health   *health.Server
	config   *trench.Watcher
	checker  *healthcheck.Checker
	index    *targetset.Index
	sources  *sources
	addrs    *kernel.Addresses
	files    *readinessfile.Writer // nil: none are written
	plane    *dataplane.Plane      // nil: there is none
	events   events
	table    *readiness.Table
	server   *readiness.Server
	observer *observer
	loop     *loop
	changed  *latest.Value[uint64] // something that status shows
	stopping *latest.Value[bool]
}

// Health services of the load balancer, beside "" and vip/<prefix>.
const (
	Liveness      = "Liveness"
	Readiness     = "Readiness"
	Egress        = "Egress"
	Configuration = "Configuration"
	// Started holds from when a trench file was accepted and every target had its first
	// verdict, whatever happens later: Readiness waits for it.
	Started  = "Started"
	Identity = "Identity"
	Serving  = "Serving"
	// ReadinessSocket and AdminSocket serve while the socket files lead to lb. They are
	// not part of Readiness: open connections are not affected.
	ReadinessSocket = "ReadinessSocket"
	AdminSocket     = "AdminSocket"
	// SourcesCondition is not part of Readiness: what is wrong with one source must
	// not end the others.
	SourcesCondition = "Sources"
	// DataPlaneCondition always serves without a data plane. It is not part of
	// Readiness: what ails one VIP must not end the others, and while nothing can be
	// changed the kernel forwards as before.
	DataPlaneCondition = "DataPlane"
	// DataPlaneHoldCondition serves while nothing is held. It is not part of Readiness.
	DataPlaneHoldCondition = "DataPlaneHold"
)

// Run runs a load balancer until stop is received from, and then ends it in
// stages: it notifies the frontend, continues to serve until the frontend withdrew
// every VIP, and only then tears down. A second receive skips to the end. The
// end of ctx ends everything at once.
func Run(ctx context.Context, o Options, stop <-chan struct{}) error {
	p, err := newProcess(o)
	if err != nil {
		return err
	}
	return p.run(ctx, stop)
}

func newProcess(o Options) (*process, error) {
	if err := ValidateLease(o.Lease); err != nil {
		return nil, err
	}
	p := &process{
		Options: o, metrics: metrics.NewLB(o.Version),
		changed: latest.New(uint64(0)), stopping: latest.New(false),
	}
	p.health = health.New(health.Options{Log: o.Log, Changed: p.metrics.Health})
	p.health.Define(Readiness, Started, Identity, Serving)
	p.health.Set(Configuration, o.Config != nil, "the trench file was not accepted yet")
	p.health.Set(Identity, false, "no SVID yet")
	p.health.Set(Serving, false, "the readiness socket is not served yet")
	p.health.Set(Egress, false, "no frontend has reported yet")
	p.health.Set(Liveness, true, "")
	p.config = trench.NewWatcher(o.TrenchFile, o.Defaults, o.Config, o.Log)
	p.health.Set(SourcesCondition, true, "")
	p.health.Set(DataPlaneCondition, true, "")
	p.health.Set(DataPlaneHoldCondition, true, "")
	p.addrs = kernel.NewAddresses(o.Log)
	p.checker = healthcheck.New(healthcheck.Options{Log: o.Log, Sources: p.addrs})
	if err := p.newSources(); err != nil {
		return nil, err
	}
	p.table = readiness.NewTable(readiness.TableOptions{Lease: o.Lease, StaleGrace: o.StaleGrace})
	role := readiness.RolesOf(o.Frontends, o.Readers)
	if !o.FrontendDomain.IsZero() {
		exact := role
		role = func(id spiffeid.ID) readiness.Role {
			if r := exact(id); r != readiness.RoleNone || !id.MemberOf(o.FrontendDomain) {
				return r
			}
			return readiness.RoleFrontend
		}
	}
	p.server = readiness.NewServer(p.table, readiness.ServerOptions{
		Peer: identity.PeerID, Role: role, MaxStreamsPerPeer: o.MaxStreamsPerPeer, Log: o.Log,
	})
	p.observer = newObserver(p)
	p.loop = &loop{
		config: p.config.Value(), sources: p.sources, subnets: o.Targets.Subnets, checker: p.checker, index: p.index, table: p.table,
		lease: o.Lease, log: o.Log, observe: p.observer.decided, event: p.events.add, files: p.files, away: p.stopping,
		ready: make(chan struct{}),
		evaluator: serving.New(serving.Options{
			Settle: settleTime(o.StaleGrace), Outage: o.Targets.Outage, DataPlane: o.DataPlane != nil, WithdrawTime: o.DrainTime + stopMargin,
		}),
	}
	p.metrics.Targets(p.targetMetrics)
	if o.DataPlane != nil {
		if err := p.newDataPlane(); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// newDataPlane prepares the data plane.
func (p *process) newDataPlane() error {
	p.DataPlane.StateDir, p.DataPlane.Log, p.DataPlane.OnRepair = p.Targets.StateDir, p.Log, p.dataPlaneRepaired
	plane, err := dataplane.New(*p.DataPlane)
	if err != nil {
		return fmt.Errorf("data plane: %w", err)
	}
	p.plane = plane
	p.health.Set(DataPlaneCondition, false, "the kernel has not been read yet")
	p.loop.plane = &forwarder{
		plane: plane, frontend: p.server, position: p.table.Position, applied: p.metrics.DataPlane(p.dataPlaneMetrics), log: p.Log,
		sent: map[uint64]time.Time{},
	}
	return nil
}

// Files in the state directory.
const (
	drainsFile        = "drains.json"
	registrationsFile = "registrations.json"
)

// newSources creates the sources of targets.
func (p *process) newSources() error {
	o := p.Targets
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return fmt.Errorf("state directory (--state-dir): %w", err)
	}
	drains, err := targetset.OpenDrains(filepath.Join(o.StateDir, drainsFile), p.Log)
	if err != nil {
		return err
	}
	ro := registry.Options{Off: !o.Sources.Registry, Allow: o.Allow, Quota: o.Quota, Grace: o.Grace, OnGone: o.OnRegistryGone, Log: p.Log}
	if o.Sources.Registry {
		ro.StateFile = filepath.Join(o.StateDir, registrationsFile)
	}
	reg, err := registry.New(ro)
	if err != nil {
		return err
	}
	if o.WriteReadinessDir != "" {
		p.files = readinessfile.NewWriter(o.WriteReadinessDir, p.Log)
	}
	p.index, p.sources = targetset.NewIndex(), newSources(o, reg, drains)
	return nil
}

// sourceTasks are the tasks of the sources.
func (p *process) sourceTasks() []task.Task {
	tasks := []task.Task{p.sources.registry, p.addrs}
	if p.files != nil {
		tasks = append(tasks, p.files)
	}
	return tasks
}

// targetService serves the registry to callers with SPIFFE IDs, or to the operator.
func (p *process) targetService(operator bool) *registry.Service {
	return registry.NewService(p.sources.registry, p.index, registry.ServiceOptions{
		Peer: identity.PeerID, Operator: operator, Reader: p.mayRead, Log: p.Log,
	})
}

// mayRead reports whether an ID may see the targets of every stream.
func (p *process) mayRead(id spiffeid.ID) bool {
	return slices.Contains(p.Readers, id) || slices.Contains(p.Frontends, id)
}

// run starts everything and stops it in order.
func (p *process) run(ctx context.Context, stop <-chan struct{}) (err error) {
	listener, err := identity.Listen(ctx, identity.ListenOptions{Path: p.Socket, Mode: p.SocketMode, Watch: p.health.Reporter(ReadinessSocket)})
	if err != nil {
		return fmt.Errorf("readiness socket: %w", err)
	}
	connections := endpoint.MaxConnections
	if p.Targets.Sources.Registry {
		connections = endpoint.MaxRegistryConnections
	}
	listener = endpoint.Limit(listener, connections)
	// The grpc.Server closes the listener too; a second Close does no harm.
	defer func() {
		if e := listener.Close(); e != nil && !isClosed(e) {
			err = errors.Join(err, fmt.Errorf("close readiness socket: %w", e))
		}
	}()
	creds := identity.ServerCredentials(p.Identity, identity.CredentialOptions{Authorize: p.authorize(), Log: p.Log})
	options := slices.Concat(readiness.GRPCOptions(), p.metrics.ServerOptions(), []grpc.ServerOption{grpc.Creds(creds)})
	if p.Targets.Sources.Registry {
		// Each Register is a stream; beyond the limit of a connection calls would wait
		// without a word.
		options = append(options, grpc.MaxConcurrentStreams(registry.MaxCallsPerConnection))
	}
	server := grpc.NewServer(options...)
	readinessv1.RegisterReadinessServiceServer(server, p.server)
	targetv1.RegisterTargetServiceServer(server, p.targetService(false))
	p.health.Register(server)
	reflection.Register(server)
	p.metrics.Serves(server)

	adminEndpoint, err := endpoint.NewAdmin(ctx, p.AdminSocket, p.Log, p.metrics, p.health.Reporter(AdminSocket), func(r grpc.ServiceRegistrar) {
		lbv1.RegisterLBServiceServer(r, &admin{process: p})
		targetv1.RegisterTargetServiceServer(r, p.targetService(true))
		p.health.Register(r)
	})
	if err != nil {
		return err
	}
	unused := []*endpoint.Endpoint{adminEndpoint}
	defer func() {
		for _, e := range unused {
			e.Close()
		}
	}()
	healthEndpoint, err := endpoint.NewPlain(ctx, "health", p.HealthAddr, p.metrics, p.health.Register)
	if err != nil {
		return err
	}
	unused = append(unused, healthEndpoint)
	tasks := []task.Task{
		p.Identity, p.config, p.checker, p.loop, adminEndpoint, healthEndpoint,
		p.observer, logs.NewSignals(p.Level, p.Log),
	}
	tasks = append(tasks, p.sourceTasks()...)
	if p.plane != nil {
		tasks = append(tasks, p.plane)
	}
	if p.Targets.RegistryAddr != "" {
		registryEndpoint, err := endpoint.NewMutual(ctx, "registry", p.Targets.RegistryAddr, p.metrics, creds, registry.GRPCOptions(), func(r grpc.ServiceRegistrar) {
			targetv1.RegisterTargetServiceServer(r, p.targetService(false))
			p.health.Register(r)
		})
		if err != nil {
			return err
		}
		unused = append(unused, registryEndpoint)
		tasks = append(tasks, registryEndpoint)
	}
	if p.MetricsAddr != "" {
		listeners, err := endpoint.ListenTCP(ctx, p.MetricsAddr, endpoint.MaxConnections, true)
		if err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
		tasks = append(tasks, metrics.NewServer(listeners, p.metrics.Registry(), p.Log))
	}
	unused = nil // the tasks close what they serve

	tasksCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	var wg sync.WaitGroup
	var tasksErr error
	failed := make(chan struct{})
	wg.Go(func() {
		defer close(failed)
		tasksErr = task.Run(tasksCtx, tasks...)
	})
	// The socket answers only once the first evaluation has been committed, and waits a
	// little for the first SVID: without one every client is refused, and asks again.
	served := make(chan error, 1)
	wg.Go(func() {
		select {
		case <-p.Identity.Ready():
		case <-time.After(svidWait):
		case <-tasksCtx.Done():
		}
		select {
		case <-p.loop.Ready():
			p.health.Set(Serving, true, "")
			p.Log.Info("serving readiness", "socket", p.Socket, "trench", p.config.Value().Load().Config.Trench, "lease", p.Lease, "instance_id", p.table.Position().InstanceID)
			served <- server.Serve(listener)
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
	p.endStreams(server)
	cancel()
	wg.Wait()
	return errors.Join(serveErr, tasksErr, p.removeDataPlane(ctx, withdrawn))
}

// cleanupTimeout bounds the removal of the data plane at the end.
const cleanupTimeout = 10 * time.Second

// removeDataPlane removes the data plane if that is wanted and no VIP needs it.
func (p *process) removeDataPlane(ctx context.Context, withdrawn bool) error {
	if p.plane == nil || !p.RemoveDataPlane || !withdrawn {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	removed, err := dataplane.Cleanup(ctx, *p.DataPlane)
	p.Log.Info("removed the data plane", "objects", len(removed))
	if err != nil {
		return fmt.Errorf("remove the data plane: %w", err)
	}
	return nil
}

// authorize lets in frontends, readers and those who may register targets; what
// each of them may do is for the services to say.
func (p *process) authorize() tlsconfig.Authorizer {
	exact := append(slices.Clone(p.Frontends), p.Readers...)
	wide := identity.Authorize(exact...)
	if !p.FrontendDomain.IsZero() {
		wide = identity.AuthorizeMember(p.FrontendDomain, exact...)
	}
	if !p.Targets.Sources.Registry {
		return wide
	}
	return func(id spiffeid.ID, chains [][]*x509.Certificate) error {
		if p.sources.registry.Authorizes(id) {
			return nil
		}
		if err := wide(id, chains); err != nil {
			return fmt.Errorf("%w, or one that --target-id allows: %s", err, p.Targets.Allow)
		}
		return nil
	}
}

// endStreams ends the readiness streams, and then all connections.
func (p *process) endStreams(server *grpc.Server) {
	p.health.Set(Serving, false, "stopping")
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := p.server.EndWatches(ctx); err != nil {
		p.Log.Warn("a reader did not take the end of its stream; closing its connection", "error", err)
	}
	p.health.Shutdown()
	server.Stop()
}
