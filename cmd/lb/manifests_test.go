package main

import (
	"slices"
	"testing"

	"github.com/vipgate/vipgate/pkg/lb"
	"github.com/vipgate/vipgate/test/clitest"
)

func deployed(t *testing.T) *clitest.Program {
	return &clitest.Program{Name: "lb", Manifest: "base/deployment.yaml", CommandLine: clitest.CommandLine{
		Parser:    parser(t),
		Services:  []string{"", lb.Liveness, lb.Readiness, lb.Egress, lb.Configuration, lb.Identity, lb.Serving},
		Variables: []string{"GOMEMLIMIT", "SPIFFE_ENDPOINT_SOCKET"},
		Reads:     []string{"trench-file"},
	}}
}

func TestContainerAndImageFitProgram(t *testing.T) { deployed(t).Fits(t) }

// The comparison with the manifest sees each kind of mistake.
func TestMistakesInTheContainerAreSeen(t *testing.T) {
	set := func(name, value string) func(*clitest.Container) {
		return func(c *clitest.Container) {
			i := slices.IndexFunc(c.Env, func(e clitest.Env) bool { return e.Name == name })
			if i < 0 {
				c.Env = append(c.Env, clitest.Env{Name: name})
				i = len(c.Env) - 1
			}
			c.Env[i].Value = value
		}
	}
	mount := func(path string, f func(*clitest.Mount)) func(*clitest.Container) {
		return func(c *clitest.Container) {
			f(&c.VolumeMounts[slices.IndexFunc(c.VolumeMounts, func(m clitest.Mount) bool { return m.MountPath == path })])
		}
	}
	for _, tt := range []struct {
		name  string
		spoil func(*clitest.Container)
		want  string
	}{
		{"an unknown flag", func(c *clitest.Container) { c.Args = append(c.Args, "--bogus") }, "unknown flag --bogus"},
		{"an unknown command", func(c *clitest.Container) { c.Args = []string{"serve"} }, "unexpected argument serve"},
		{"an unknown variable", set("VIPGATE_SOCKET_MOD", "0660"), "nothing reads the variable VIPGATE_SOCKET_MOD"},
		{"a variable of the other program", set("VIPGATE_LB_ID", "spiffe://a/b"), "nothing reads the variable VIPGATE_LB_ID"},
		{"a refused value", set("VIPGATE_SOCKET_MODE", "0666"), "0660 for a group that both containers share"},
		{"a value of the wrong type", set("VIPGATE_LEASE", "1"), "VIPGATE_LEASE"},
		{"a reference to nothing", set("VIPGATE_SOCKET", "$(HOST_IP)"), "refers to a variable that is not set"},
		{
			"health on the loopback", set("VIPGATE_HEALTH_ADDRESS", "127.0.0.1"),
			"--health-address is 127.0.0.1, not the pod's address",
		},
		{
			"a probe of another port", func(c *clitest.Container) { c.LivenessProbe.GRPC.Port = 7780 },
			"the liveness probe asks port 7780",
		},
		{
			"a probe of a service that is not served", func(c *clitest.Container) { c.ReadinessProbe.GRPC.Service = "Ready" },
			`the readiness probe asks for "Ready", which is not served`,
		},
		{"no probe", func(c *clitest.Container) { c.StartupProbe = nil }, "has no startup probe"},
		{"another health port", set("VIPGATE_HEALTH_ADDRESS", "$(POD_IP):9999"), "the program listens on [9999 2223]"},
		{
			"a socket outside of the mounts", set("VIPGATE_SOCKET", "unix:///var/run/lb.sock"),
			"--socket is /var/run/lb.sock, which lies in no mount",
		},
		{
			"a socket in a read-only mount", mount("/var/lib/meridio", func(m *clitest.Mount) { m.ReadOnly = true }),
			"which lies in a read-only mount",
		},
		{
			"a mount that nothing uses", mount("/run/vipgate", func(m *clitest.Mount) { m.MountPath = "/run/other" }),
			"nothing uses the mount /run/other",
		},
		{
			"the trench file elsewhere", set("VIPGATE_TRENCH_FILE", "/etc/trench.yaml"),
			"--trench-file is /etc/trench.yaml, which lies in no mount",
		},
		{
			"the Workload API elsewhere", set("SPIFFE_ENDPOINT_SOCKET", "unix:///run/spire/agent.sock"),
			"SPIFFE_ENDPOINT_SOCKET is /run/spire/agent.sock, which lies in no mount",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lb := deployed(t)
			c := lb.Container(t)
			tt.spoil(c)
			clitest.WantProblem(t, c.Problems(t, lb.CommandLine), tt.want)
		})
	}
}
