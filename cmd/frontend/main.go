// Command frontend is the advertising side of vipgate. It runs BIRD and advertises a VIP only
// while the load balancer reports it as ready and a gateway session is up.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
)

type commandLine struct {
	Run           runCommand           `cmd:"" default:"withargs" help:"Run BIRD and advertise VIPs (also without a command)."`
	Validate      validateCommand      `cmd:"" help:"Check the trench file and the flags without starting anything."`
	Render        renderCommand        `cmd:"" help:"Print BIRD's configuration, without secrets."`
	GatewayConfig gatewayConfigCommand `cmd:"" name:"gateway-config" help:"Print the router's side of gateways, without secrets."`
	SpeakerConfig speakerConfigCommand `cmd:"" name:"speaker-config" help:"Print the side of a BGP speaker that another program runs, without secrets."`
	frontendcmd.Commands

	cli.Globals
}

func main() {
	if err := raiseCapabilities(); err != nil {
		fmt.Fprintln(os.Stderr, "frontend:", err)
		os.Exit(1)
	}
	os.Exit(cli.Main(context.Background(), frontendcmd.Program(), &commandLine{}, os.Args[1:]))
}
