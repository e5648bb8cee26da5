package main

import (
	"os"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

// hostLine returns the flags of `lb run` with these arguments.
func hostLine(t *testing.T, args ...string) *commandLine {
	t.Helper()
	line := &commandLine{}
	k, err := cli.New(program(), line)
	harness.Must(t, err)
	_, err = k.Parse(append([]string{"run"}, args...))
	harness.Must(t, err)
	return line
}

func TestHostExampleFits(t *testing.T) {
	clitest.Environment(t, parser(t), "host/lb.env")
	line := hostLine(t, "--trench-file="+clitest.Deployments+"host/trench.yaml")
	o, err := line.Run.options(process.Settings{}, false)
	harness.Must(t, err)
	own := identity.UserID(uint32(os.Geteuid()))
	if len(o.Frontends) != 1 || o.Frontends[0] != own || o.VIPInterface != "lo" || o.StaleGrace != 0 {
		t.Errorf("got %+v", o)
	}
}

func TestStaticPodFits(t *testing.T) {
	pod := clitest.Read[struct{ Spec clitest.Pod }](t, clitest.Deployments+"host/static-pod.yaml").Spec
	c, p := pod.Container(t, "lb"), deployed(t)
	// Of the trench file of the example.
	p.Documented = func(path string) bool { return path == "/etc/kubernetes/pki" }
	for _, problem := range append(c.Problems(t, p.CommandLine), c.ImageProblems(p.Image(t))...) {
		t.Error(problem)
	}
	line := hostLine(t, "--trench-file="+clitest.Deployments+"host/trench.yaml")
	o, err := line.Run.options(process.Settings{}, false)
	harness.Must(t, err)
	if len(o.Frontends) != 1 || o.Frontends[0] != identity.UserID(10002) || o.VIPInterface != "lo" {
		t.Errorf("got %+v", o)
	}
}

func TestHostFlags(t *testing.T) {
	const file = "--trench-file=" + clitest.Deployments + "host/trench.yaml"
	for args, want := range map[string]string{
		"--identity=peer-credentials --frontend-id=spiffe://a.org/x":          "use --frontend-uid",
		"--identity=peer-credentials --frontend-trust-domain=a.org":           "use --frontend-uid",
		"--identity=peer-credentials --registry-address=127.0.0.1:7790":       "--registry-address conflicts with",
		"--identity=dev --dev-authority-dir=/tmp --frontend-uid=5":            "--frontend-uid needs --identity=peer-cred",
		"--identity=dev --dev-authority-dir=/tmp":                             "--frontend-id is required",
		"--identity=peer-credentials --vip-interface=lo --dataplane=nftables": "--vip-interface=lo needs --dataplane=none",
		"--identity=peer-credentials --frontend-uid=7 --dataplane=nftables":   "127.0.0.1, which needs --dataplane=none",
		"--identity=peer-credentials --frontend-uid=65534 --vip-interface=lo": "--frontend-uid=65534 is the user",
		"--identity=uid": "use spiffe, files, dev or peer-credentials",
	} {
		t.Run(args, func(t *testing.T) {
			line := hostLine(t, append(strings.Fields(args), file)...)
			_, err := line.Run.options(process.Settings{}, false)
			harness.WantError(t, err, want)
		})
	}
}
