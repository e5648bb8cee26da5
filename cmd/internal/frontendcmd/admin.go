package frontendcmd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/bfdlease"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/kernel"
	"github.com/vipgate/vipgate/pkg/status"
)

// Commands are the commands that ask or change a running frontend, and remove its traces.
type Commands struct {
	Status      statusCommand      `cmd:"" help:"Show every VIP, whether it is advertised, and why not. Exit status 1 when one is not."`
	Explain     explainCommand     `cmd:"" help:"Show each step of a VIP's traffic, with the remedy. Exit status 1 if one is broken."`
	Events      eventsCommand      `cmd:"" help:"Show the last transitions with their causes."`
	Drain       drainCommand       `cmd:"" help:"Move traffic away from VIPs or a gateway: de-prefer, then withdraw. It survives restarts."`
	Undrain     undrainCommand     `cmd:"" help:"End a drain."`
	ApplyNow    applyNowCommand    `cmd:"" help:"End the drains and turns of an edit. Traffic may be lost."`
	Confirm     confirmCommand     `cmd:"" help:"Put held removals of the configuration in force: VIPs and gateways drain and are withdrawn."`
	Cleanup     cleanupCommand     `cmd:"" help:"Remove the marks, rules and blackhole of vipgate from the kernel."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Dump        cli.DumpCommand    `cmd:"" hidden:"" help:"Print the configuration in force and the state of the kernel."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`
}

type client = frontendv1.FrontendServiceClient

// call makes one call of a method on the admin socket of a frontend.
func call[Q, R any](ctx context.Context, f cli.AdminFlags,
	method func(client, context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) (R, error) {
	return cli.Call(ctx, "frontend", f, frontendv1.NewFrontendServiceClient, method, request)
}

type statusCommand struct {
	cli.StatusFlags
	cli.VIPFlags
}

func (c *statusCommand) Run(ctx context.Context, out *cli.Output) error {
	choose, err := cli.Select(c.VIPFlags, status.SelectFrontend)
	if err != nil {
		return err
	}
	withExports := func(s *frontendv1.Status) error {
		if c.showsExports(s) {
			c.addExports(ctx, s)
		}
		return choose(s)
	}
	return cli.RunStatus(ctx, out, c.StatusFlags, "frontend", frontendv1.NewFrontendServiceClient, client.WatchStatus,
		withExports, c.View().Frontend)
}

// showsExports reports whether BIRD is asked for its exports. A list of many VIPs is long and takes
// BIRD some time, and --watch repeats it.
func (c *statusCommand) showsExports(s *frontendv1.Status) bool {
	switch {
	case s.GetBird().GetExternal(), c.Watch || c.Output == "problems" || s.GetBird().GetError() != "":
		return false
	case len(c.VIPs) > 0 || c.Output != "table":
		return true
	}
	return len(s.GetVips()) <= status.MaxExported
}

// exportsTimeout bounds the wait for BIRD, without which the status is printed.
const exportsTimeout = 2 * time.Second

// addExports adds how BIRD exports the VIPs to a status.
func (c *statusCommand) addExports(ctx context.Context, s *frontendv1.Status) {
	ctx, cancel := context.WithTimeout(ctx, exportsTimeout)
	defer cancel()
	request := &frontendv1.ListExportsRequest{}
	if len(c.VIPs) == 1 {
		request.Vip, _ = cli.ParseVIP(c.VIPs[0]) // Run checked it
	}
	response, err := call(ctx, c.AdminFlags, client.ListExports, request)
	switch {
	case ctx.Err() != nil:
		s.ExportsError = fmt.Sprintf("BIRD did not list them within %v", exportsTimeout)
	case err != nil:
		s.ExportsError = cli.Explain(err).Error()
	}
	s.Exports = response.GetExports()
}

type drainCommand struct {
	cli.AdminFlags
	cli.DrainEnd
	VIPs    []string `arg:"" optional:"" name:"vip" help:"VIPs such as 20.0.0.1/32."`
	All     bool     `help:"Drain every VIP, also those that are configured later." env:"-"`
	Gateway []string `help:"De-prefer every VIP toward this gateway, then withdraw it there; repeatable." placeholder:"NAME" env:"-"`
	Force   bool     `help:"Drain also the last advertiser of a VIP, and the last gateway of a family." env:"-"`
}

func (c *drainCommand) Run(ctx context.Context, out *cli.Output) error {
	switch {
	case c.All && len(c.VIPs) > 0, len(c.Gateway) > 0 && (c.All || len(c.VIPs) > 0):
		return cli.Usage("--all, --gateway and VIPs exclude each other")
	case !c.All && len(c.VIPs) == 0 && len(c.Gateway) == 0:
		return cli.Usage("no VIP to drain; name VIPs such as 20.0.0.1/32, or set --all to drain every VIP")
	}
	endsAfter, err := c.EndsAfter()
	if err != nil {
		return err
	}
	r, err := call(ctx, c.AdminFlags, client.Drain, &frontendv1.DrainRequest{
		Vips: c.VIPs, All: c.All, Gateways: c.Gateway, Force: c.Force, EndsAfter: endsAfter,
	})
	if err != nil {
		return err
	}
	if r.GetWarning() != "" {
		out.Printf("warning: %s\n", r.GetWarning())
	}
	if len(c.Gateway) > 0 {
		out.Printf("drained gateways: %s\n", strings.Join(r.GetGateways(), " "))
		return nil
	}
	if draining := r.GetDraining(); len(draining) > 0 {
		out.Printf("draining until %s, then withdrawn: %s\n", r.GetUntil().AsTime().Format(time.RFC3339),
			strings.Join(draining, " "))
	}
	// VIPs whose drain is over are withdrawn already.
	over := slices.DeleteFunc(r.GetDrained(), func(v string) bool { return slices.Contains(r.GetDraining(), v) })
	if len(over) > 0 {
		out.Printf("drained: %s\n", strings.Join(over, " "))
	}
	return nil
}

type confirmCommand struct{ cli.ConfirmFlags }

func (c *confirmCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.Confirm(ctx, out, c.ConfirmFlags, "frontend")
}

type undrainCommand struct {
	cli.AdminFlags
	Gateway []string `help:"End the drain of this gateway; repeatable." placeholder:"NAME" env:"-"`
	VIPs    []string `arg:"" optional:"" name:"vip" help:"VIPs such as 20.0.0.1/32; none means all."`
}

func (c *undrainCommand) Run(ctx context.Context, out *cli.Output) error {
	r, err := call(ctx, c.AdminFlags, client.Undrain, &frontendv1.UndrainRequest{Vips: c.VIPs, Gateways: c.Gateway})
	switch {
	case err != nil:
		return err
	case len(r.GetGateways()) > 0:
		out.Printf("still drained gateways: %s\n", strings.Join(r.GetGateways(), " "))
	case len(c.Gateway) > 0:
		out.Printf("no gateway is drained\n")
	}
	switch {
	case len(c.Gateway) > 0 && len(c.VIPs) == 0:
	case len(r.GetDrained()) == 0:
		out.Printf("no VIP is drained\n")
	default:
		out.Printf("still drained: %s\n", strings.Join(r.GetDrained(), " "))
	}
	return nil
}

type applyNowCommand struct {
	cli.AdminFlags
}

func (c *applyNowCommand) Run(ctx context.Context, out *cli.Output) error {
	r, err := call(ctx, c.AdminFlags, client.ApplyNow, &frontendv1.ApplyNowRequest{})
	if err != nil {
		return err
	}
	if len(r.GetVips())+len(r.GetGateways()) == 0 {
		out.Printf("no change was in progress\n")
		return nil
	}
	out.Printf("applied now: %s\n", strings.Join(append(r.GetVips(), r.GetGateways()...), " "))
	return nil
}

type cleanupCommand struct{ KernelFlags }

func (c *cleanupCommand) Run(ctx context.Context, out *cli.Output) error {
	ctx, cancel := context.WithTimeout(ctx, cli.CallTimeout)
	defer cancel()
	o := c.KernelFlags.options()
	if err := o.Validate(); err != nil {
		return cli.Usage("%w", err)
	}
	// A running frontend would restore the removed objects.
	release, err := identity.OwnNetNS(ctx, "frontend", "frontend cleanup", identity.NetNSFallback{})
	if err != nil {
		return err
	}
	defer release()
	// Both tables are removed, even if one of them fails.
	if err := errors.Join(kernel.Cleanup(ctx, o), bfdlease.Cleanup(ctx)); err != nil {
		return err
	}
	out.Printf("marks, rules and blackholes of vipgate are removed\n")
	return nil
}

type eventsCommand struct {
	cli.EventFlags
	VIP string `name:"vip" help:"Only events of this VIP." placeholder:"PREFIX"`
}

func (c *eventsCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.ShowEvents(ctx, out, c.EventFlags, "frontend", c.VIP, status.FrontendEventLog())
}
