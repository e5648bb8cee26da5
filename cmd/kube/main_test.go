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
	k, err := cli.New(program(), &commandLine{})
	harness.Must(t, err)
	return k
}

func TestConfigurationDocument(t *testing.T) {
	clitest.Texts(t, "kube", true, parser(t), cli.Variables(program(), parser(t)))
}

func TestPodName(t *testing.T) {
	for _, c := range []struct{ flag, variable, want string }{
		{"", "", "host"}, {"", "a", "a"}, {"b", "a", "b"}, {"b", "", "b"},
	} {
		t.Setenv("POD_NAME", c.variable)
		if got := (&runCommand{PodName: c.flag}).podName("host"); got != c.want {
			t.Errorf("%+v: got %s", c, got)
		}
	}
}
