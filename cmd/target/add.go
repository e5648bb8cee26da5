package main

import (
	"context"
	"log/slog"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	targetadminv1 "github.com/vipgate/vipgate/pkg/api/targetadmin/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/registration"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/trench"
)

type addCommand struct {
	cli.TargetFlags
	Registry    []string    `required:"" help:"Registry of load balancers over mTLS, repeatable: HOST:PORT, where HOST is an address or a name of several, or unix:///PATH of the readiness socket of one." placeholder:"ADDRESS"`
	LBID        spiffeid.ID `name:"lb-id" required:"" help:"SPIFFE ID of the load balancers." placeholder:"ID" group:"Identity"`
	AdminSocket string      `help:"Unix socket for target status." default:"unix:///run/vipgate/target/add.sock" placeholder:"SOCKET"`
	cli.Identity
}

func (c *addCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.RunUntilStopped(trench.MaxDrainTime, func(stops <-chan struct{}) error { return c.run(ctx, out, stops) })
}

func (c *addCommand) run(ctx context.Context, out *cli.Output, stops <-chan struct{}) error {
	o, err := c.options(out)
	if err != nil {
		return err
	}
	group := registration.NewGroup(o)
	// The command reports by lines on stdout; a log would repeat them.
	log := slog.New(slog.DiscardHandler)
	admin, err := endpoint.NewAdmin(ctx, c.AdminSocket, log, uncounted{}, func(error) {}, func(s grpc.ServiceRegistrar) {
		targetadminv1.RegisterTargetAdminServiceServer(s, newGroupAdmin(group))
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	// The group needs the SVID, and the admin socket shows its status until its end.
	background := make(chan error, 1)
	go func() {
		err := task.Run(ctx, admin, o.Source)
		cancel(err) // the group needs both tasks
		background <- err
	}()
	err = cli.RunUntilDrained(ctx, out, stops, group.Run)
	// Only now: the group deregisters with the SVID of the source.
	cancel(nil)
	if failure := <-background; failure != nil {
		return failure
	}
	return err
}

func (c *addCommand) options(out *cli.Output) (o registration.GroupOptions, err error) {
	var refused cli.Refusals
	o.LB = c.LBID
	o.Request, err = c.Request()
	refused.Add(err)
	for _, text := range c.Registry {
		a, err := registration.ParseAddress(text)
		refused.If(err != nil, "--registry=%w", err)
		o.Registries = append(o.Registries, a)
	}
	refused.Socket("--admin-socket", c.AdminSocket)
	o.Source, err = c.Source(cli.DefaultTargetID, slog.New(slog.DiscardHandler))
	refused.Add(err)
	o.Report = func(registry, line string) { out.Printf("%s: %s\n", registry, line) }
	return o, refused.Err()
}

type groupAdmin struct {
	targetadminv1.UnsafeTargetAdminServiceServer
	endpoint.StatusServer[targetadminv1.Status, uint64]
}

func newGroupAdmin(group *registration.Group) *groupAdmin {
	read := func(context.Context) *targetadminv1.Status {
		return &targetadminv1.Status{Version: cli.Version(), Registrations: group.Status()}
	}
	return &groupAdmin{StatusServer: endpoint.StatusServer[targetadminv1.Status, uint64]{
		Read: read, Changes: &group.Changes,
	}}
}

// uncounted counts no calls: `target add` has no metrics.
type uncounted struct{}

// ServerOptions implements endpoint.Calls.
func (uncounted) ServerOptions() []grpc.ServerOption { return nil }

// Serves implements endpoint.Calls.
func (uncounted) Serves(reflection.ServiceInfoProvider) {}
