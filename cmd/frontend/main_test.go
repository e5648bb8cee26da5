package main

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
)

var update = flag.Bool("update", false, "write docs/configuration.md instead of comparing it")

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == containerArgument {
		fmt.Fprintln(os.Stderr, runContainer(os.Args[2]))
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

func parser(t *testing.T) *kong.Kong { return parserOf(t, &commandLine{}) }

func parserOf(t *testing.T, line *commandLine) *kong.Kong {
	t.Helper()
	k, err := cli.New(program(), line)
	if err != nil {
		t.Fatal(err)
	}
	return k
}
