package main

import (
	"context"
	"fmt"
	"net"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/dashboard"
)

type dashboardCommand struct{}

func (*dashboardCommand) Run(ctx context.Context, out *cli.Output, line *commandLine) error {
	source, err := line.source()
	if err != nil {
		return err
	}
	ctx, cancel := cli.Interruptible(ctx)
	defer cancel()
	// A page without any pod would show only this error.
	if _, err := source.Members(ctx); err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("failed to listen on the loopback address: %w", err)
	}
	page := dashboard.New(source)
	out.Printf("%s\nOpen this address in a browser of this machine; Ctrl-C ends it.\n", page.URL(listener))
	return page.Serve(ctx, listener)
}
