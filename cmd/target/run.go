package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os/signal"
	"syscall"
	"time"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/replypath"
	"github.com/vipgate/vipgate/pkg/sidecar"
	"github.com/vipgate/vipgate/pkg/status"
)

type runCommand struct {
	Pool       []netip.Prefix `required:"" help:"Prefix of VIPs, of either family; repeatable." placeholder:"PREFIX"`
	Interface  string         `required:"" help:"Network interface toward the trench pods." placeholder:"IF"`
	PeerSubnet []netip.Prefix `help:"Own addresses of trench pods; repeatable. Others' packets are dropped." placeholder:"PREFIX"`
	Once       bool           `help:"Install the kernel state, print it and exit: it stays without the process."`

	cli.Process
}

// role is the role of this program in its network namespace.
const role = "target"

func (c *runCommand) Run(ctx context.Context, out *cli.Output, stderr *logs.Writer) error {
	o := sidecar.Options{Settings: c.Settings(stderr)}
	o.ReplyPath = replypath.Options{Pool: c.Pool, Interface: c.Interface, Log: o.Log}
	o.ReplyPath.PeerSubnets = c.PeerSubnet
	var refused cli.Refusals
	c.check(&refused, o.ReplyPath)
	if err := refused.Err(); err != nil {
		return err
	}
	about := "admin socket " + c.AdminSocket
	if c.Once {
		about = "target run --once"
	}
	// Two targets would repair each other's kernel state.
	release, err := identity.OwnNetNS(ctx, role, about,
		identity.NetNSFallback{AdminSocket: c.AdminSocket, Log: o.Log})
	if err != nil {
		return err
	}
	defer release()
	// After the lock, so that lb and frontend find this process when they start later.
	if err := refuseTrenchPod(ctx, o.Log); err != nil {
		return err
	}
	if c.Once {
		return install(ctx, o, out)
	}
	o.Log.Info("starting target", "version", o.Version, "pool", c.Pool, "interface", c.Interface)
	return cli.RunUntilStopped(0, func(stops <-chan struct{}) error { return sidecar.Run(ctx, o, stops) })
}

// refuseTrenchPod returns an error in the network namespace of lb or frontend: packets to VIPs that
// they forward would be delivered there.
func refuseTrenchPod(ctx context.Context, log *slog.Logger) error {
	for _, other := range []string{"lb", "frontend"} {
		switch owner, plausible := identity.NetNSOwner(ctx, other); {
		case plausible:
			return fmt.Errorf("%s runs in this network namespace, and target would take the packets that it forwards; "+
				"run target in the pods of applications", owner)
		case owner != "":
			log.Warn("another user's process has the socket of a program that forwards", "owner", owner)
		}
	}
	return nil
}

// check refuses values that would fail later.
func (c *runCommand) check(r *cli.Refusals, o replypath.Options) {
	err := o.Validate()
	r.If(err != nil, "--pool=%v, --interface=%s: %w", o.Pool, o.Interface, err)
	r.If(c.Once && len(c.PeerSubnet) > 0,
		"--once with --peer-subnet=%v: new trench pods need the process", c.PeerSubnet)
	c.Process.Check(r, cli.Port{})
}

func install(ctx context.Context, o sidecar.Options, out *cli.Output) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	state, err := replypath.Install(ctx, o.ReplyPath)
	// After an error before the first read, there is no state to print.
	if !state.Since.IsZero() {
		text, _ := status.Target(sidecar.Describe(o, state, nil), time.Now())
		out.Printf("%s", text)
	}
	if err != nil {
		return fmt.Errorf("failed to install the kernel state: %w", err)
	}
	return nil
}

type cleanupCommand struct{}

func (cleanupCommand) Run(ctx context.Context, out *cli.Output) error {
	// A running target would restore the removed objects.
	release, err := identity.OwnNetNS(ctx, role, "target cleanup", identity.NetNSFallback{})
	if err != nil {
		return err
	}
	defer release()
	removed, err := replypath.Cleanup(ctx)
	// After an error, the list has the objects that were removed before it.
	for _, object := range removed {
		out.Printf("removed: %s\n", object)
	}
	if err != nil {
		return fmt.Errorf("failed to remove the kernel state: %w", err)
	}
	if len(removed) == 0 {
		out.Printf("nothing to remove\n")
	}
	return nil
}
