package sidecar

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"

	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/metrics"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/pkg/task"
)

// Options configure a target. Every field is required unless stated otherwise.
type Options struct {
	shell.Settings
	ReplyPath replypath.Options
}

// Health services of a target, in addition to "" and one for each address of the pool.
const (
	Liveness = "Liveness"
	// Readiness is ReplyPath: packets to the pool are accepted and answered.
	Readiness = "Readiness"
	ReplyPath = "ReplyPath" // all of the kernel state was read back
)

// process holds the parts of one target.
type process struct {
	Options
	shell   *shell.Process
	path    *replypath.Path
	health  *health.Server
	metrics *metrics.Target
	changed latest.Value[struct{}] // notifies watches of the status
}

// Run keeps the kernel state complete until a receive from stop, or the end of ctx.
func Run(ctx context.Context, o Options, stop <-chan struct{}) error {
	p := &process{Options: o, path: replypath.New(o.ReplyPath)}
	p.metrics = metrics.NewTarget(o.Version, p.metricState)
	p.shell = shell.New(o.Settings, p.metrics)
	p.health = p.shell.Health
	p.health.Define(Readiness, ReplyPath)
	// Set each condition before the listeners open: Check returns NotFound for an unset condition.
	p.health.Report(Liveness, "")
	p.health.Report(ReplyPath, "the kernel state was not read yet")
	p.health.Report(shell.AdminSocket, "")
	return p.run(ctx, stop)
}

func (p *process) run(ctx context.Context, stop <-chan struct{}) error {
	defer p.shell.Close()
	// Connections to VIPs belong to the application.
	err := p.shell.Listen(ctx, shell.Services{
		Admin: func(r grpc.ServiceRegistrar) {
			targetadminv1.RegisterTargetAdminServiceServer(r, newAdmin(p))
		},
		Health: addressHealth{p.health, p}.register, HealthRefused: p.inPool, MetricsRefused: p.inPool,
	})
	if err != nil {
		return err
	}
	return p.shell.Run(ctx, stop, shell.Plan{Stages: [][]task.Task{{p.path, observer{p}}}})
}

// inPool reports whether VIPs may have the address.
func (p *process) inPool(a netip.Addr) bool {
	// A dual-stack listener reports IPv4 as a mapped IPv6 address, which no prefix contains.
	a = a.Unmap().WithZone("")
	return slices.ContainsFunc(p.ReplyPath.Pool, func(in netip.Prefix) bool { return in.Contains(a) })
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
		// Until the first read of the kernel, the reason of the start holds.
		if s := o.path.Status(); !s.Since.IsZero() {
			o.health.Report(ReplyPath, logs.Text(s.Err()))
		}
		o.changed.Set(struct{}{})
		select {
		case <-o.path.Changed():
		// New flows notify nothing: only a read of the connection tracking table counts them.
		case <-refresh.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
