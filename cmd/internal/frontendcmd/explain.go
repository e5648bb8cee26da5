package frontendcmd

import (
	"context"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

type explainCommand struct{ cli.ExplainFlags }

func (c *explainCommand) Run(ctx context.Context, out *cli.Output) error {
	chain, err := c.Chain()
	if err != nil {
		return err
	}
	if err := cli.ExplainPod(ctx, chain, c.AdminSocket); err != nil {
		return err
	}
	return cli.ShowChain(out, chain, c.Output)
}
