// Command frontend is the advertising side of vipgate: it runs BIRD and
// advertises a VIP only while the load balancer says that it is ready and a
// gateway session is up.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

// commandLine is what frontend understands.
type commandLine struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Run BIRD and advertise VIPs (also without a command)."`
	Status      statusCommand      `cmd:"" help:"Show every VIP, whether it is advertised, and why not. Exit status 1 when one is not."`
	Events      eventsCommand      `cmd:"" help:"Show the last transitions with their causes."`
	Drain       drainCommand       `cmd:"" help:"Move traffic away from VIPs: de-prefer, then withdraw."`
	Undrain     undrainCommand     `cmd:"" help:"Take a drain back."`
	Validate    validateCommand    `cmd:"" help:"Check the trench file and the flags without starting anything."`
	Render      renderCommand      `cmd:"" help:"Print BIRD's configuration, without secrets."`
	Cleanup     cleanupCommand     `cmd:"" help:"Remove our marks, rules and blackhole from the kernel."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Debug       debugCommand       `cmd:"" help:"Print interfaces, rules, routes, neighbors and environment as JSON with the keys of Meridio's --debug, without secrets."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() {
	adopted, err := adoptMeridio(os.LookupEnv, os.Setenv, os.Environ(), os.Stderr)
	if err != nil {
		os.Exit(cli.Status("frontend", err))
	}
	p := program()
	p.Aliases = adopted
	os.Exit(cli.Main(context.Background(), p, &commandLine{}, os.Args[1:]))
}

func program() cli.Program {
	return cli.Program{
		Name:        "frontend",
		Description: "Advertises the VIPs of a trench over BGP, each only while the load balancer can forward it and a gateway session is up.",
		HealthPort:  defaultHealthPort,
	}
}

// defaultHealthPort is where probes ask for the health services.
const defaultHealthPort = 7780

func usage(format string, args ...any) error {
	return &cli.UsageError{Err: fmt.Errorf(format, args...)}
}
