package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/status"
)

type statusCommand struct {
	cli.StatusFlags
}

// Run prints the status once, or again at every change.
func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	return withFrontend(c.AdminSocket, func(client frontendv1.FrontendServiceClient) error {
		return cli.ShowStatus(ctx, out, c.StatusFlags,
			func(ctx context.Context) (*frontendv1.Status, error) {
				r, err := client.GetStatus(ctx, &frontendv1.GetStatusRequest{})
				return r.GetStatus(), err
			},
			func(ctx context.Context) (func() (*frontendv1.Status, error), error) {
				stream, err := client.WatchStatus(ctx, &frontendv1.WatchStatusRequest{})
				if err != nil {
					return nil, err
				}
				return func() (*frontendv1.Status, error) {
					r, err := stream.Recv()
					return r.GetStatus(), err
				}, nil
			},
			func(s *frontendv1.Status) (string, bool) { return status.Frontend(s, time.Now()) },
		)
	})
}

// adminFlags are the flags of commands that talk to a running frontend.
type adminFlags struct {
	AdminSocket string `help:"Unix socket of the running process." default:"${admin_socket}" placeholder:"SOCKET"`
}

func withFrontend(socket string, f func(frontendv1.FrontendServiceClient) error) error {
	conn, err := cli.DialAdmin("frontend", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(frontendv1.NewFrontendServiceClient(conn))
}

type drainCommand struct {
	adminFlags
	VIPs []string `arg:"" optional:"" name:"vip" help:"VIPs such as 20.0.0.1/32; none means all."`
}

// Run drains VIPs.
func (c *drainCommand) Run(out *cli.Output) error {
	return withFrontend(c.AdminSocket, func(client frontendv1.FrontendServiceClient) error {
		ctx, cancel := cli.CallContext()
		defer cancel()
		r, err := client.Drain(ctx, &frontendv1.DrainRequest{Vips: c.VIPs})
		if err != nil {
			return cli.Explain(err)
		}
		if draining := r.GetDraining(); len(draining) > 0 {
			out.Printf("draining until %s, then withdrawn: %s\n", r.GetUntil().AsTime().Format(time.RFC3339), strings.Join(draining, " "))
		}
		over := slices.DeleteFunc(r.GetDrained(), func(v string) bool { return slices.Contains(r.GetDraining(), v) })
		if len(over) > 0 {
			out.Printf("drained: %s\n", strings.Join(over, " "))
		}
		return nil
	})
}

type undrainCommand struct {
	adminFlags
	VIPs []string `arg:"" optional:"" name:"vip" help:"VIPs such as 20.0.0.1/32; none means all."`
}

// Run takes drains back.
func (c *undrainCommand) Run(out *cli.Output) error {
	return withFrontend(c.AdminSocket, func(client frontendv1.FrontendServiceClient) error {
		ctx, cancel := cli.CallContext()
		defer cancel()
		r, err := client.Undrain(ctx, &frontendv1.UndrainRequest{Vips: c.VIPs})
		if err != nil {
			return cli.Explain(err)
		}
		if len(r.GetDrained()) == 0 {
			out.Printf("no VIP is drained\n")
		} else {
			out.Printf("still drained: %s\n", strings.Join(r.GetDrained(), " "))
		}
		return nil
	})
}

type debugCommand struct{ adminFlags }

// Run prints the debug document.
func (c *debugCommand) Run(out *cli.Output) error {
	return withFrontend(c.AdminSocket, func(client frontendv1.FrontendServiceClient) error {
		ctx, cancel := cli.CallContext()
		defer cancel()
		r, err := client.GetDebug(ctx, &frontendv1.GetDebugRequest{})
		if err != nil {
			return cli.Explain(err)
		}
		var pretty bytes.Buffer
		if err := json.Indent(&pretty, []byte(r.GetJson()), "", "  "); err != nil {
			return fmt.Errorf("debug document: %w", err)
		}
		out.Printf("%s\n", pretty.String())
		return nil
	})
}

type cleanupCommand struct{ kernelFlags }

// Run removes what is ours from the kernel.
func (c *cleanupCommand) Run(ctx context.Context, out *cli.Output) error {
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	o := c.kernelOptions()
	if err := o.Validate(); err != nil {
		return usage("%w", err)
	}
	release, err := identity.OwnNetNS(ctx, "frontend", "frontend cleanup")
	if err != nil {
		return err
	}
	defer release()
	if err := kernel.Cleanup(ctx, o); err != nil {
		return err
	}
	out.Printf("marks, rules and blackholes of vipgate are removed\n")
	return nil
}
