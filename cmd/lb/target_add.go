package main

import (
	"context"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/registration"
	"github.com/vipgate/vipgate/pkg/trench"
)

type targetAddCommand struct {
	cli.AdminFlags
	registryFlags
	cli.TargetFlags
}

func (c *targetAddCommand) Run(ctx context.Context, out *cli.Output) error {
	return cli.RunUntilStopped(trench.MaxDrainTime, func(stops <-chan struct{}) error { return c.run(ctx, out, stops) })
}

func (c *targetAddCommand) run(ctx context.Context, out *cli.Output, stops <-chan struct{}) error {
	request, err := c.Request()
	if err != nil {
		return err
	}
	// A target may start before the load balancer, so wait for it.
	conn, err := c.connect(ctx, c.AdminFlags, true)
	if err != nil {
		return err
	}
	defer conn.close()
	r := registration.Registration{
		Conn: conn.Conn, Request: request, Report: func(line string) { out.Printf("%s\n", line) },
	}
	return cli.RunUntilDrained(ctx, out, stops, r.Run)
}
