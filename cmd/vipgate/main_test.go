package main

import (
	"testing"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func parser(t *testing.T) *kong.Kong {
	t.Helper()
	k, err := cli.New(program("vipgate"), &commandLine{})
	harness.Must(t, err)
	return k
}

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "vipgate", false, parser(t), cli.Variables(program("vipgate"), parser(t)))
}

func TestNameOfThePlugin(t *testing.T) {
	for executable, want := range map[string]string{
		"/usr/bin/vipgate": "vipgate", "/home/operator/.krew/bin/kubectl-vipgate": "kubectl vipgate",
		"kubectl-vipgate": "kubectl vipgate",
	} {
		if got := program(executable).Name; got != want {
			t.Errorf("%s: got %s, want %s", executable, got, want)
		}
	}
}
