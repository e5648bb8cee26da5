package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/pkg/task"
)

// Options configure a target. Every field is required unless stated otherwise.
type Options struct {
	Version string
	// Pool and Interface are passed to replypath.Options.
	Pool      []netip.Prefix
	Interface string
	// HealthAddr and MetricsAddr are host:port; an empty MetricsAddr serves none.
	AdminSocket, HealthAddr, MetricsAddr string
	// RemoveOnExit removes the kernel state after a stop. Otherwise it stays, so that flows continue.
	RemoveOnExit bool

	Log   *slog.Logger
	Level *logs.Level
	// LostLines returns the number of lines of the log that were lost since the start.
	LostLines func() uint64
}

// Health services of a target, in addition to "" and one for each address of the pool.
const (
	Liveness = "Liveness"
	// Readiness is ReplyPath: packets to the pool are accepted and answered.
	Readiness   = "Readiness"
	ReplyPath   = "ReplyPath"   // all of the kernel state was read back
	AdminSocket = "AdminSocket" // the socket file leads to this process
)

// flowsTimeout bounds a count of flows, for which the kernel lists its connection tracking entries.
const flowsTimeout = 2 * time.Second

// process holds the parts of one target.
type process struct {
	Options
	path    *replypath.Path
	health  *health.Server
	metrics *metrics.Target
	changed latest.Value[struct{}] // notifies watches of the status
}

// Run keeps the kernel state complete until a receive from stop, or the end of ctx.
func Run(ctx context.Context, o Options, stop <-chan struct{}) error {
	p := &process{Options: o, path: replypath.New(o.ReplyPath())}
	p.metrics = metrics.NewTarget(o.Version, p.metricState)
	p.metrics.LostLines(o.LostLines)
	p.health = health.New(o.Log, p.metrics.Health)
	p.health.Define(Readiness, ReplyPath)
	p.health.Report(Liveness, "")
	p.health.Report(ReplyPath, "the kernel state was not read yet")
	p.health.Report(AdminSocket, "")
	return p.run(ctx, stop)
}

// ReplyPath returns the options of the kernel state.
func (o Options) ReplyPath() replypath.Options {
	return replypath.Options{Pool: o.Pool, Interface: o.Interface, Log: o.Log}
}

func (p *process) run(ctx context.Context, stop <-chan struct{}) error {
	tasks, err := p.tasks(ctx)
	if err != nil {
		return err
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-stop:
			p.Log.Info("stopping", "kernel_state_stays", !p.RemoveOnExit)
			p.health.Shutdown()
			cancel()
		case <-ended:
		}
	})
	err = task.Run(running, tasks...)
	close(ended)
	wg.Wait()
	if !p.RemoveOnExit || err != nil {
		return err
	}
	removed, err := Cleanup(context.WithoutCancel(ctx))
	if err == nil {
		p.Log.Info("kernel state removed", "objects", removed)
	}
	return err
}

// cleanupTimeout bounds the removal of the kernel state.
const cleanupTimeout = 10 * time.Second

// Cleanup removes the kernel state and returns the removed objects.
func Cleanup(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	removed, err := replypath.Cleanup(ctx)
	if err != nil {
		return removed, fmt.Errorf("failed to remove the kernel state: %w", err)
	}
	return removed, nil
}

// tasks returns the tasks of the process, with open listeners.
func (p *process) tasks(ctx context.Context) (tasks []task.Task, err error) {
	var endpoints []*endpoint.Endpoint
	defer func() {
		if err != nil {
			for _, e := range endpoints {
				e.Close()
			}
		}
	}()
	adminEndpoint, err := endpoint.NewAdmin(ctx, p.AdminSocket, p.Log, p.metrics, p.health.Reporter(AdminSocket),
		func(r grpc.ServiceRegistrar) {
			targetadminv1.RegisterTargetAdminServiceServer(r, newAdmin(p))
			adminv1.RegisterLogServiceServer(r, endpoint.LogService{Level: p.Level, Log: p.Log})
			p.health.Register(r)
		})
	if err != nil {
		return nil, err
	}
	endpoints = append(endpoints, adminEndpoint)
	healthEndpoint, err := endpoint.NewPlainExcept(ctx, "health", p.HealthAddr, p.inPool, p.metrics,
		addressHealth{p.health, p}.register)
	if err != nil {
		return nil, err
	}
	endpoints = append(endpoints, healthEndpoint)
	tasks = []task.Task{p.path, observer{p}, adminEndpoint, healthEndpoint, logs.NewSignals(p.Level, p.Log)}
	if p.MetricsAddr != "" {
		listeners, err := endpoint.ListenTCP(ctx, p.MetricsAddr, endpoint.MaxConnections, true)
		if err != nil {
			return nil, fmt.Errorf("--metrics-port: %w", err)
		}
		for i, l := range listeners {
			listeners[i] = endpoint.Except(l, p.inPool)
		}
		tasks = append(tasks, metrics.NewServer(listeners, p.metrics.Registry(), p.Log))
	}
	return tasks, nil
}

// inPool reports whether VIPs may have the address.
func (p *process) inPool(a netip.Addr) bool {
	for _, prefix := range p.Pool {
		if prefix.Contains(a.Unmap().WithZone("")) {
			return true
		}
	}
	return false
}

// flows counts the flows of VIPs by the link address of their peer.
func (p *process) flows(ctx context.Context) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, flowsTimeout)
	defer cancel()
	return p.path.Flows(ctx)
}

// observer sets the health service of the kernel state. It implements task.Task.
type observer struct{ *process }

// String implements task.Task.
func (observer) String() string { return "observer" }

// refreshInterval is how often watches of the status get new counts of flows.
const refreshInterval = 2 * time.Second

// Run observes until ctx ends.
func (o observer) Run(ctx context.Context) error {
	refresh := time.NewTicker(refreshInterval)
	defer refresh.Stop()
	for {
		if s := o.path.Status(); !s.Since.IsZero() {
			o.health.Report(ReplyPath, logs.Text(Incomplete(s)))
		}
		o.changed.Set(struct{}{})
		select {
		case <-o.path.Changed():
		case <-refresh.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Incomplete returns an error with the problems of an incomplete kernel state and their remedies;
// nil when it is complete.
func Incomplete(s replypath.Status) error {
	if s.Complete {
		return nil
	}
	if len(s.Problems) == 0 {
		return errors.New("the kernel state is not complete")
	}
	var all []string
	for _, p := range s.Problems {
		text := p.Object + ": " + p.Detail
		if p.Remedy != "" {
			text += "; " + p.Remedy
		}
		all = append(all, text)
	}
	return errors.New(strings.Join(all, "\n"))
}
