package main

import (
	"context"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type statusCommand struct {
	cli.StatusFlags
	cli.VIPFlags
}

// Run exits with 1 while the trench file may be outdated, an object is refused or not published,
// or no pod writes status.
func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	choose, err := cli.Select(c.VIPFlags, status.SelectKube)
	if err != nil {
		return err
	}
	return cli.RunStatus(ctx, out, c.StatusFlags, "kube", kubev1.NewKubeServiceClient,
		kubev1.KubeServiceClient.WatchStatus, choose, c.View().Kube)
}
