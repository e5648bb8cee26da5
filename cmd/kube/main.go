// Command kube is the Kubernetes side of vipgate: it translates a Trench and its Services to the
// trench file.
package main

import (
	"context"
	"os"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

type commandLine struct {
	Translate translateCommand   `cmd:"" help:"Print the trench file and the verdicts of objects, without a cluster."`
	Version   cli.VersionCommand `cmd:"" help:"Print the version."`

	cli.Globals
}

func main() {
	os.Exit(cli.Main(context.Background(), program(), &commandLine{}, os.Args[1:]))
}

func program() cli.Program {
	return cli.Program{Name: "kube", Description: "Translates a Trench and its Services to the trench file."}
}
