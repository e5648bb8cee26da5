package main

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/trench"
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
	clitest.Texts(t, "vipgate-probe", false, parser(t), cli.Variables(program(), parser(t)))
}

func TestContainerAndImageFitProgram(t *testing.T) {
	p := &clitest.Program{Name: "vipgate-probe", Manifest: "probe/deployment.yaml", CommandLine: clitest.CommandLine{
		Parser: parser(t), Services: []string{"", liveness, readiness},
	}}
	p.Fits(t)
	pod := clitest.ReadPod(t, p.Manifest)
	for _, problem := range pod.Problems() {
		t.Error(problem)
	}
}

// Every variable of the unit's file is one of a flag, with a valid value.
func TestUnitFitsProgram(t *testing.T) {
	text, err := os.ReadFile(clitest.Deployments + "systemd/probe.env")
	harness.Must(t, err)
	known := cli.Variables(program(), parser(t))
	for line := range strings.Lines(string(text)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		if t.Setenv(name, value); !strings.Contains(strings.Join(known, "\n")+"\n", name+"\n") {
			t.Errorf("nothing reads %s", name)
		}
	}
	var line commandLine
	k, err := cli.New(program(), &line)
	harness.Must(t, err)
	if _, err := k.Parse([]string{"run"}); err != nil || line.Run.TrenchFile != "/etc/vipgate/trench.yaml" {
		t.Errorf("%q: %v", line.Run.TrenchFile, err)
	}
}

func TestChecksOfFlags(t *testing.T) {
	for text, want := range map[string]string{
		"{tcp: {port: 5000}}": "", "{http: {port: 80, path: /ready}}": "", "{tcp: {port: 0}}": "65535", "": "is empty",
		"{udp": "YAML", "{tcpp: {port: 1}}": `did you mean "tcp"`,
	} {
		if check, err := parseCheck(text); want == "" {
			harness.Check(t, err)
			if check.HTTP.Port != 0 && check.HTTP.Status == "" {
				t.Errorf("%s lacks defaults: %+v", text, check)
			}
		} else {
			harness.WantError(t, err, want)
		}
	}
}

func TestRefusedFlags(t *testing.T) {
	good := func() runCommand {
		vip, err := parseVIP("20.0.0.1")
		harness.Must(t, err)
		c := runCommand{
			Check: "{tcp: {port: 5000}}", Ports: 4, PortBase: 31000, Interval: time.Second, Timeout: time.Second,
			Fall: 2, Rate: 10,
		}
		c.VIP = append(c.VIP, vip)
		c.LogLevel, c.LogFormat, c.AdminSocket = "info", "text", "unix:///run/admin.sock"
		c.HealthAddress = cli.Address{AddrPort: netip.MustParseAddrPort("127.0.0.1:7784")}
		return c
	}
	for want, change := range map[string]func(*runCommand){
		"":                 func(*runCommand) {},
		"--trench-file or": func(c *runCommand) { c.TrenchFile = "trench.yaml" },
		"no VIPs":          func(c *runCommand) { c.VIP = nil },
		"--check=":         func(c *runCommand) { c.Check = "" },
		"--ports=65":       func(c *runCommand) { c.Ports = 65 },
		"--port-base":      func(c *runCommand) { c.PortBase = 65533 },
		"--interval":       func(c *runCommand) { c.Interval = 0 },
		"--timeout":        func(c *runCommand) { c.Timeout = 0 },
		"--fall":           func(c *runCommand) { c.Fall = 0 },
		"--rate":           func(c *runCommand) { c.Rate = 0 },
		"--lb=7790":        func(c *runCommand) { c.LB = []string{"7790"} },
		"--lb needs":       func(c *runCommand) { c.LB = []string{"lb:7790"} },
		"no identity":      func(c *runCommand) { c.LB = []string{"lb:7790"} },
		"--source":         func(c *runCommand) { c.Source = []netip.Addr{netip.MustParseAddr("fe80::1%eth0")} },
	} {
		c, refused := good(), cli.Refusals{}
		change(&c)
		if c.check(&refused); want == "" {
			harness.Check(t, refused.Err())
		} else {
			harness.WantError(t, refused.Err(), want)
		}
	}
	c, refused := good(), cli.Refusals{}
	c.Ports = 64
	c.check(&refused)
	harness.Check(t, refused.Err())
	c = good()
	if targets := c.targets(nil); len(targets) != 1 || targets[0].Checks[0].TCP != (trench.TCPCheck{Port: 5000}) {
		t.Errorf("targets %+v", targets)
	}
}
