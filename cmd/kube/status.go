package main

import (
	"context"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type statusCommand struct {
	cli.StatusFlags
}

// Run exits with 1 while the trench file may be outdated, an object is refused or not published,
// or no pod writes status.
func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	conn, err := cli.DialAdmin("kube", c.AdminSocket, false)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := c.Context(ctx)
	defer cancel()
	stream, err := kubev1.NewKubeServiceClient(conn).WatchStatus(ctx, &adminv1.WatchStatusRequest{})
	if err != nil {
		return err
	}
	return cli.ShowStatus(ctx, out, c.StatusFlags, stream.Recv,
		func(s *kubev1.Status) (string, bool) { return status.Kube(s, time.Now()) })
}
