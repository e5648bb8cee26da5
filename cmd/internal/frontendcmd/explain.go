package frontendcmd

import (
	"context"
	"path/filepath"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	"github.com/vipgate/vipgate/pkg/identity"
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
	// By default both programs of a pod have their admin sockets in one folder.
	socket, err := identity.SocketPath(c.AdminSocket)
	if err != nil {
		return err
	}
	lb := cli.AdminFlags{AdminSocket: "unix://" + filepath.Join(filepath.Dir(socket), "lb.sock")}
	balancer, err := cli.Call(ctx, "lb", lb, lbv1.NewLBServiceClient, lbv1.LBServiceClient.GetStatus,
		&adminv1.GetStatusRequest{})
	if err == nil {
		chain.LBSteps(balancer, time.Now())
	} else {
		chain.Unasked = "lb was not asked (" + cli.Explain(err).Error() + "): `lb explain " + c.VIP + "` in its container"
	}
	chain.FrontendSteps(current, time.Now())
	return c.Show(out, chain)
}
