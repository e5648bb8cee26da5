package main

import (
	"testing"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/container"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) {
	container.Main()
	goleak.VerifyTestMain(m)
}

func parser(t *testing.T) *kong.Kong { return parserOf(t, &commandLine{}) }

func parserOf(t *testing.T, line *commandLine) *kong.Kong {
	t.Helper()
	k, err := cli.New(program(), line)
	harness.Must(t, err)
	return k
}
