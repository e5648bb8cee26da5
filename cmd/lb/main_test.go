package main

import (
	"testing"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func parser(t *testing.T) *kong.Kong {
	t.Helper()
	k, err := cli.New(program(), &commandLine{})
	harness.Must(t, err)
	return k
}
