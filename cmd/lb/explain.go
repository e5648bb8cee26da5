package main

import (
	"context"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
)

type explainCommand struct{ cli.ExplainFlags }

func (c *explainCommand) Run(ctx context.Context, out *cli.Output) error {
	chain, err := c.Chain()
	if err != nil {
		return err
	}
	current, err := call(ctx, c.AdminFlags, client.GetStatus, &adminv1.GetStatusRequest{})
	if err != nil {
		return err
	}
	chain.LBSteps(current, time.Now())
	return cli.ShowChain(out, chain, c.Output)
}
