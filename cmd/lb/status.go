package main

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type client = lbv1.LBServiceClient

// call makes one call of a method on the admin socket of an lb.
func call[Q, R any](ctx context.Context, f cli.AdminFlags,
	method func(client, context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) (R, error) {
	return cli.Call(ctx, "lb", f, lbv1.NewLBServiceClient, method, request)
}

type statusCommand struct {
	cli.StatusFlags
	cli.VIPFlags
}

func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	choose, err := cli.Select(c.VIPFlags, status.SelectLB)
	if err != nil {
		return err
	}
	return cli.RunStatus(ctx, out, c.StatusFlags, "lb", lbv1.NewLBServiceClient, client.WatchStatus, choose,
		func(s *lbv1.Status, now time.Time) (string, bool) { return c.View().LB(s, now), true })
}

type confirmCommand struct{ cli.ConfirmFlags }

func (c *confirmCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.Confirm(ctx, out, c.ConfirmFlags, "lb")
}

type eventsCommand struct{ cli.EventFlags }

func (c *eventsCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.ShowEvents(ctx, out, c.EventFlags, "lb", "", status.LBEventLog())
}
