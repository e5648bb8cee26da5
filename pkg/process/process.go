package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench/file"
)

// AdminSocket is the health service that serves while the socket file leads to this process. It is
// not part of Readiness.
const AdminSocket = "AdminSocket"

// Settings are the options that all programs share.
type Settings struct {
	Version string
	// HealthAddr and MetricsAddr are host:port; an empty MetricsAddr disables metrics.
	AdminSocket, HealthAddr, MetricsAddr string

	Log   *slog.Logger
	Level *logs.Level
	// Trial, unless nil, is the trial of the trench file.
	Trial *file.Trial
	// LostLines returns the number of log lines lost since the start.
	LostLines func() uint64
	// Tracer exports the traces of decisions; nil if there are none.
	Tracer journal.Tracer
}

// Metrics are the metrics of a program.
type Metrics interface {
	endpoint.Calls
	Health(service string, serving, known bool)
	LostLines(lost func() uint64)
	LostTraces(lost func() uint64)
	Registry() *prometheus.Registry
}

// Process is a program that runs. Create one with [New].
type Process struct {
	Health *health.Server

	settings Settings
	metrics  Metrics
	tasks    []task.Task          // of the listeners and signals
	unused   []*endpoint.Endpoint // that do not run yet
}

// New returns a process without listeners and tasks.
func New(settings Settings, metrics Metrics) *Process {
	metrics.LostLines(settings.LostLines)
	p := &Process{Health: health.New(settings.Log, metrics.Health), settings: settings, metrics: metrics}
	if settings.Tracer != nil {
		metrics.LostTraces(settings.Tracer.Lost)
		p.tasks = append(p.tasks, settings.Tracer)
	}
	return p
}

// Services are the services of the listeners.
type Services struct {
	// Admin registers services of the admin socket, in addition to grpc.health.v1 and LogService.
	Admin endpoint.Register
	// Health registers the health service of the health port, unless nil.
	Health endpoint.Register
	// HealthRefused and MetricsRefused report whether connections to an address are closed; nil: none.
	HealthRefused, MetricsRefused func(local netip.Addr) bool
	// Audit records changes of the log level, unless nil.
	Audit endpoint.Audit
	// Signals handles the signals of the log level, unless nil.
	Signals *logs.Signals
}

// Listen opens the admin socket, the health port and the metrics port.
func (p *Process) Listen(ctx context.Context, services Services) error {
	err := p.Serve(endpoint.NewAdmin(ctx, p.settings.AdminSocket, p.settings.Log, p.metrics,
		p.Health.Reporter(AdminSocket), func(registrar grpc.ServiceRegistrar) {
			services.Admin(registrar)
			adminv1.RegisterLogServiceServer(registrar, endpoint.LogService{
				Level: p.settings.Level, Log: p.settings.Log, Audit: services.Audit,
			})
			p.Health.Register(registrar)
		}))
	if err != nil {
		return err
	}
	if services.Health == nil {
		services.Health = p.Health.Register
	}
	err = p.Serve(endpoint.NewPlain(ctx, "health", p.settings.HealthAddr, services.HealthRefused, p.metrics,
		services.Health))
	if err != nil {
		return err
	}
	if p.settings.MetricsAddr != "" {
		listeners, err := endpoint.ListenTCP(ctx, p.settings.MetricsAddr, endpoint.MaxConnections, true)
		if err != nil {
			return fmt.Errorf("--metrics-address: %w", err)
		}
		for i, listener := range listeners {
			listeners[i] = endpoint.Except(listener, services.MetricsRefused)
		}
		p.tasks = append(p.tasks, metrics.NewServer(listeners, p.metrics.Registry(), p.settings.Log))
	}
	if services.Signals == nil {
		services.Signals = logs.NewSignals(p.settings.Level, p.settings.Log)
	}
	p.tasks = append(p.tasks, services.Signals)
	return nil
}

// Serve adds the endpoint that a constructor returned.
func (p *Process) Serve(server *endpoint.Endpoint, err error) error {
	if err != nil {
		return err
	}
	// Until Run, Close must close it; from then on its task does.
	p.unused, p.tasks = append(p.unused, server), append(p.tasks, server)
	return nil
}

// Close closes the listeners of a process that did not run.
func (p *Process) Close() {
	for _, server := range p.unused {
		server.Close()
	}
}

// Plan is the order in which the tasks of a process stop.
type Plan struct {
	// Decides is the loop that decides about VIPs; nil if there is none.
	Decides task.Loop
	// Stages are groups of tasks. A group ends after the groups before it. The listeners end with the
	// first group.
	Stages [][]task.Task
	// Drain, unless nil, moves traffic away before the first stage ends. It ends early after a receive
	// from again or the end of ctx.
	Drain func(ctx context.Context, again <-chan struct{})
}

// Run runs the tasks until a receive from stop, and then stops them in stages, after a drain. The
// end of ctx and a failed task skip the drain.
func (p *Process) Run(ctx context.Context, stop <-chan struct{}, plan Plan) error {
	stages := slices.Clone(plan.Stages)
	stages[0] = slices.Concat(stages[0], p.tasks)
	if trial := p.settings.Trial; trial != nil {
		trial.Overdue = p.Health.Overdue
		stages[0] = append(stages[0], trial)
	}
	p.Health.Alive(plan.Decides, slices.Concat(stages...)...)
	// A running endpoint closes itself: after a call that hangs, Close would wait for the call.
	p.unused = nil
	failed := make(chan struct{}, len(stages))
	ends := make([]func() error, len(stages))
	for i, tasks := range stages {
		// The tasks outlive ctx, so that they end in stages after its cancellation, too.
		running, cancel := context.WithCancel(context.WithoutCancel(ctx))
		ended := make(chan error, 1)
		go func() {
			err := task.Run(running, tasks...)
			failed <- struct{}{}
			ended <- err
		}()
		ends[i] = func() error {
			cancel()
			return <-ended
		}
	}
	taskFailed := false
	select {
	case <-ctx.Done():
	case <-failed:
		taskFailed = true
		// A drain may need the failed task, such as the loop that sends readiness.
	case <-stop:
		p.settings.Log.Info("stopping")
		if plan.Drain != nil {
			plan.Drain(ctx, stop)
		}
	}
	// Open Watch streams would delay the end of the health endpoint.
	p.Health.Shutdown()
	errs := make([]error, len(ends))
	for i, end := range ends {
		errs[i] = end()
	}
	err := errors.Join(errs...)
	if taskFailed {
		p.settings.Trial.Fail(err)
	}
	return err
}
