package main

import (
	"testing"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/container"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) {
	container.Main()
	goleak.VerifyTestMain(m)
}

func parser(t *testing.T) *kong.Kong {
	t.Helper()
	k, err := cli.New(program(), &commandLine{})
	harness.Must(t, err)
	return k
}

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "target", true, parser(t), cli.Variables(program(), parser(t)))
}
