// Command meridio-frontend is the frontend in a pod of Meridio 1.x. VIPs and gateways come from
// Meridio's NSP, and variables, paths, probes and signals are Meridio's.
package main

import (
	"context"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/cmd/internal/frontendcmd"
	"github.com/vipgate/vipgate/pkg/meridio/debug"
)

type commandLine struct {
	Run   runCommand   `cmd:"" default:"withargs" help:"Run BIRD and advertise the VIPs of the NSP (also without a command)."`
	Debug debugCommand `cmd:"" help:"Print interfaces, rules, routes, neighbors and environment as JSON with the keys of Meridio's --debug, without secrets."`
	frontendcmd.Commands

	cli.Globals
}

type debugCommand struct {
	TableID uint32 `name:"table-id" help:"Routing table of the gateways' routes." default:"4096" placeholder:"N"`
}

func (c *debugCommand) Run(out *cli.Output) error {
	document, err := debug.Document(cli.Version(), c.TableID)
	if err != nil {
		return err
	}
	out.Printf("%s\n", document)
	return nil
}

func main() {
	os.Exit(cli.Main(context.Background(), program(), &commandLine{}, arguments(os.Args[1:])))
}

// program describes the command line in Meridio's pod. Only /etc/bird, /var/run/bird, /var/log and
// /tmp are writable, probes run in the container, and metrics are scraped at its address.
func program() cli.Program {
	p := frontendcmd.Program()
	p.AdminSocket, p.MetricsHost, p.IdentityCache = "/tmp/frontend.sock", "0.0.0.0", "/etc/bird/svid.json"
	p.Aliases = append(aliases, p.Aliases...)
	return p
}

// arguments rewrites command lines of Meridio's frontend that kong parses differently. Meridio uses
// Go's flag package, which accepts a single dash. Its --debug alone prints a document and exits.
func arguments(args []string) []string {
	if len(args) != 1 {
		return args
	}
	switch args[0] {
	case "-debug", "--debug":
		return []string{"debug"}
	case "-version":
		return []string{"--version"}
	case "-help":
		return []string{"--help"}
	}
	return args
}
