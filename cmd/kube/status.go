package main

import (
	"context"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/pkg/status"
)

type statusCommand struct {
	cli.StatusFlags
}

// Run exits with 1 while the trench file may be outdated, an object is refused or not published,
// or no pod writes status.
func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.RunStatus(ctx, out, c.StatusFlags, "kube", kubev1.NewKubeServiceClient,
		kubev1.KubeServiceClient.WatchStatus, status.Kube)
}
