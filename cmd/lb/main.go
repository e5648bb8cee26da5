// Command lb is the load balancer's side of vipgate: it checks targets and
// streams the readiness of VIPs to the frontend.
package main

import (
	"context"
	"os"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/readiness"
)

type commandLine struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Check targets and serve readiness (also without a command)."`
	Status      statusCommand      `cmd:"" help:"Show VIPs, streams, targets, watchers and what the frontend reports."`
	Explain     explainCommand     `cmd:"" help:"Show each step from a VIP's targets to its readiness, with the remedy. Exit status 1 if one is broken."`
	Validate    validateCommand    `cmd:"" help:"Check the trench file and the flags without starting anything."`
	Events      eventsCommand      `cmd:"" help:"Show the last events: VIPs, and drift and problems of the data plane."`
	Reconcile   reconcileCommand   `cmd:"" help:"Repair drift of the data plane at once, without back-off, except what is held."`
	Hold        holdCommand        `cmd:"" help:"Report changes of the data plane by other processes without repairing them, also over restarts."`
	Resume      resumeCommand      `cmd:"" help:"End a hold, and repair what was held."`
	Cleanup     cleanupCommand     `cmd:"" help:"Remove the data plane of vipgate from the kernel, when no lb runs."`
	Confirm     confirmCommand     `cmd:"" help:"Put held removals of the trench file in force."`
	Target      targetCommand      `cmd:"" help:"List, register, deregister and drain targets."`
	SVID        svidCommand        `cmd:"" name:"svid" help:"Sign an SVID for a person with the development authority, for grpcurl."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Dump        cli.DumpCommand    `cmd:"" hidden:"" help:"Print the configuration in force and the state of the kernel."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() { os.Exit(cli.Main(context.Background(), program(), &commandLine{}, os.Args[1:])) }

func program() cli.Program {
	return cli.Program{
		Name: "lb",
		Description: "Checks the targets of a trench and streams the readiness of its VIPs to the frontend over an mTLS " +
			"unix socket.",
		HealthPort: 7781, MetricsPort: 2223,
		Aliases: []cli.Alias{
			cli.Renamed("VIPGATE_ON_MISSING_FILE", "VIPGATE_ON_FILE_GONE"),
			cli.Renamed("VIPGATE_ON_REGISTRATION_EXPIRY", "VIPGATE_ON_REGISTRY_GONE"),
		},
		Options: []kong.Option{
			kong.Vars{"lease": readiness.DefaultLease.String()},
			cli.Mapper("a subnet such as 172.16.0.0/16", cli.ParsePrefix),
			cli.Mapper("a mode of the socket: 0600, or 0660 for a group that both containers share", parseMode),
		},
	}
}
