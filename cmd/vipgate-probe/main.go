// Command vipgate-probe checks VIPs from a host beyond the gateways: what users reach, over several
// paths, without the trench pods' own judgement.
package main

import (
	"context"
	"os"

	"github.com/alecthomas/kong"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/vip"
)

type commandLine struct {
	Run         runCommand         `cmd:"" default:"withargs" help:"Probe VIPs and export metrics (also without a command)."`
	Healthcheck cli.Healthcheck    `cmd:"" help:"Ask a health service; exit status 0 if it serves. For exec probes."`
	Version     cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() { os.Exit(cli.Main(context.Background(), program(), &commandLine{}, os.Args[1:])) }

func program() cli.Program {
	return cli.Program{
		Name: "vipgate-probe", Description: "Probes the VIPs of a trench from beyond its gateways.",
		HealthPort: 7784, MetricsPort: 2227, AdminSocket: "/run/vipgate/probe/admin.sock",
		Options: []kong.Option{cli.Mapper("a VIP such as 20.0.0.1/32 or 20.0.0.1", parseVIP)},
	}
}

// parseVIP accepts an address without a length.
func parseVIP(text string) (vip.VIP, error) {
	full, err := cli.ParseVIP(text)
	if err != nil {
		return vip.VIP{}, err
	}
	return vip.Parse(full)
}
