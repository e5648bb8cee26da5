package main

import (
	"context"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type statusCommand struct {
	cli.StatusFlags
}

// Run prints the status once, or again at every change.
func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	conn, err := cli.DialAdmin("lb", c.AdminSocket)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := lbv1.NewLBServiceClient(conn)
	return cli.ShowStatus(ctx, out, c.StatusFlags,
		func(ctx context.Context) (*lbv1.Status, error) {
			r, err := client.GetStatus(ctx, &lbv1.GetStatusRequest{})
			return r.GetStatus(), err
		},
		func(ctx context.Context) (func() (*lbv1.Status, error), error) {
			stream, err := client.WatchStatus(ctx, &lbv1.WatchStatusRequest{})
			if err != nil {
				return nil, err
			}
			return func() (*lbv1.Status, error) {
				r, err := stream.Recv()
				return r.GetStatus(), err
			}, nil
		},
		func(s *lbv1.Status) (string, bool) { return status.LB(s, time.Now()), true },
	)
}
