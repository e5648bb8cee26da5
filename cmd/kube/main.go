// Command kube writes the trench file of lb and frontend from Kubernetes objects.
package main

import (
	"context"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

type commandLine struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Watch the objects of a Trench and write the trench file (also without a command)."`
	Status      statusCommand      `cmd:"" help:"Show what is watched, whether the trench file is current, and which objects are refused."`
	Explain     explainCommand     `cmd:"" help:"Show each step from a Service to the gateways, with the remedy. Exit status 1 if one is broken."`
	Translate   translateCommand   `cmd:"" help:"Print the trench file and the verdicts of objects, without a cluster."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() { os.Exit(cli.Main(context.Background(), program(), &commandLine{}, os.Args[1:])) }

func program() cli.Program {
	return cli.Program{
		Name: "kube",
		Description: "Watches the objects of a Trench in Kubernetes and writes the trench file that lb and frontend " +
			"read.",
		HealthPort: 7782, MetricsPort: 2225, AdminSocket: "/run/vipgate/kube/admin.sock",
	}
}
