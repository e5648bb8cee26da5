// Command target makes a host, such as the pod of an application, a target of a trench: it accepts
// packets to the VIPs and answers each through the trench pod from which it came.
package main

import (
	"context"
	"os"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

type commandLine struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Accept packets to the VIP pool and keep their reply path (also without a command)."`
	Add         addCommand         `cmd:"" help:"Register this target at every load balancer behind a name, while this runs."`
	Status      statusCommand      `cmd:"" help:"Show the pool, the trench pods, their flows and what is missing. Exit status 1 when something is."`
	Cleanup     cleanupCommand     `cmd:"" help:"Remove the kernel state of target, when no target runs."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() { os.Exit(cli.Main(context.Background(), program(), &commandLine{}, os.Args[1:])) }

func program() cli.Program {
	return cli.Program{
		Name: "target",
		Description: "Accepts packets to the VIPs of a trench and answers each through the trench pod from which it " +
			"came.",
		HealthPort: 7783, MetricsPort: 2226, AdminSocket: "/run/vipgate/target/admin.sock",
		HealthHost: "0.0.0.0", HealthScope: "0.0.0.0 is every address of the host, of both families, but those of the pool",
		Options: []kong.Option{cli.Mapper("a prefix such as 20.0.0.0/24", cli.ParsePrefix)},
	}
}
