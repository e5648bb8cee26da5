// Command frontend is the advertising side of vipgate. It runs BIRD and advertises a VIP only
// while the load balancer reports it as ready and a gateway session is up.
package main

import (
	"context"
	"os"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

type commandLine struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Run BIRD and advertise VIPs (also without a command)."`
	Status      statusCommand      `cmd:"" help:"Show every VIP, whether it is advertised, and why not. Exit status 1 when one is not."`
	Events      eventsCommand      `cmd:"" help:"Show the last transitions with their causes."`
	Drain       drainCommand       `cmd:"" help:"Move traffic away from VIPs: de-prefer, then withdraw."`
	Undrain     undrainCommand     `cmd:"" help:"End a drain."`
	Validate    validateCommand    `cmd:"" help:"Check the trench file and the flags without starting anything."`
	Render      renderCommand      `cmd:"" help:"Print BIRD's configuration, without secrets."`
	Cleanup     cleanupCommand     `cmd:"" help:"Remove the marks, rules and blackhole of vipgate from the kernel."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Debug       debugCommand       `cmd:"" help:"Print interfaces, rules, routes, neighbors and environment as JSON with the keys of Meridio's --debug, without secrets."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() {
	adoptPod()
	os.Exit(cli.Main(context.Background(), program(), &commandLine{}, arguments(os.Args[1:])))
}

func program() cli.Program {
	return cli.Program{
		Name: "frontend",
		Description: "Advertises the VIPs of a trench over BGP, each only while the load balancer can forward it and a " +
			"gateway session is up.",
		DebugScope: "; on a command line without anything else, print what 'debug --local' prints",
		HealthPort: 7780, MetricsPort: 2224,
		Aliases: append(aliases, cli.Renamed("VIPGATE_ON_MISSING_DIRECTORY", "VIPGATE_ON_DIRECTORY_GONE")),
		Options: []kong.Option{
			kong.Vars{"trench_file": defaultTrenchFile},
			cli.Mapper("a mark with a mask such as 0x01000000/0xff000000", parseMark),
			cli.Mapper("a router id", parseRouterID),
			cli.Mapper("a next hop", parseNextHop),
		},
	}
}
