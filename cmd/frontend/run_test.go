package main

import (
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/identity"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

// drain needs names or --all, so that an empty variable of a script does not drain every VIP.
func TestDrainNeedsVIPs(t *testing.T) {
	for arguments, want := range map[string]string{"drain": "--all", "drain --all 20.0.0.1/32": "exclude each other"} {
		line := &commandLine{}
		if _, err := parserOf(t, line).Parse(strings.Fields(arguments)); err != nil {
			t.Fatal(err)
		}
		harness.WantError(t, line.Drain.Run(t.Context(), nil), want)
	}
}

func TestFlagsThatCannotWorkAreRefused(t *testing.T) {
	for line, want := range map[string]string{
		"--log-level=loud":                             "--log-level: ",
		"--health-address=":                            "--health-address is empty: probes need",
		"--ready-timeout=999h":                         "--ready-timeout=999h0m0s: at most 1h0m0s",
		"--readiness-dir=/d --readiness-max-age=999h":  "--readiness-max-age=999h0m0s: at most 24h0m0s",
		"--bird-executable=/etc":                       "--bird-executable=/etc: ",
		"--bird-executable=/etc/passwd":                "permission denied: install BIRD, or name its path",
		"--identity=files --svid-dir=/etc/passwd":      "not a directory; name the directory with tls.crt",
		"--rule-priority=32764":                        "--rule-priority, --mark: rule priority 32764",
		"--speaker-as=8103":                            "no effect with --speaker=bird: add --speaker=external",
		"--speaker=external --lb-bgp-port=1":           "no effect with --speaker=external: another program",
		"--speaker=external --lb-bgp-hold-time=9s":     "no effect with --speaker=external: another program",
		"--speaker=external":                           "--speaker-as is required",
		"--speaker=external --speaker-local=127.0.0.2": "--speaker-local=127.0.0.2: FRR has no route to it",
		"--speaker=external --speaker-address=x":       "--speaker-address=x: ",
		"--source-routing=off":                         "--source-routing=off needs --speaker=external",
	} {
		t.Run(line, func(t *testing.T) {
			_, err := readinessOptions(t, nil, strings.Fields(line)...)
			harness.WantError(t, err, want)
		})
	}
}

// If the interface exists, validate warns about gateways that would have no session.
func TestValidateNamesGatewaysOffTheLink(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trench.yaml")
	trench := "trench: a\nattractor:\n  name: a\n  vips: [20.0.0.1/32]\n  gateways:\n" +
		"  - {name: off, address: 169.254.100.150}\n"
	harness.Must(t, os.WriteFile(file, []byte(trench), 0o600))
	for device, want := range map[string]string{
		"lo": "frontend: warning: gateway off has no session: interface lo: gateway 169.254.100.150 is in the " +
			"network of none of its addresses (127.0.0.1/8)",
		"absent": "there is no such interface",
	} {
		t.Run(device, func(t *testing.T) {
			stderr, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
			harness.Must(t, err)
			defer stderr.Close()
			defer func(usual *os.File) { os.Stderr = usual }(os.Stderr)
			os.Stderr = stderr
			parsed, err := parser(t).Parse([]string{
				"validate", "--identity=dev", "--dev-authority-dir=" + t.TempDir(),
				"--spiffe-id=spiffe://example.org/frontend", "--lb-id=spiffe://example.org/lb", "--trench-file=" + file,
				"--external-interface=" + device,
			})
			harness.Must(t, err)
			parsed.BindTo(t.Context(), (*context.Context)(nil))
			harness.Must(t, parsed.Run(&cli.Output{Writer: io.Discard}))
			content, err := os.ReadFile(stderr.Name())
			if err != nil || strings.Count(string(content), "warning") != 1 || !strings.Contains(string(content), want) {
				t.Errorf("stderr is %q (%v), want %q", content, err, want)
			}
		})
	}
}

// Only validate refuses the port of the loopback session: a running frontend takes such an edit.
func TestGatewayWithLoopbackPort(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trench.yaml")
	text := "trench: a\nattractor:\n  name: a\n  vips: []\n" +
		"  gateways: [{name: g, address: 172.16.0.1, localPort: 1790}]\nstreams: []\n"
	harness.Must(t, os.WriteFile(file, []byte(text), 0o600))
	line := &commandLine{}
	_, err := parserOf(t, line).Parse([]string{"run", "--gating=off", "--trench-file=" + file})
	harness.Must(t, err)
	for lenient, want := range map[bool]string{true: "", false: "local port 1790, which is --lb-bgp-port's"} {
		_, config, err := line.Run.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, lenient)
		if lenient && (err != nil || config == nil) || !lenient && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("lenient %v: %v", lenient, err)
		}
	}
}

func TestHostExampleFits(t *testing.T) {
	clitest.Environment(t, parser(t), "host/frontend.env")
	line := &commandLine{}
	_, err := parserOf(t, line).Parse([]string{"run", "--trench-file=" + clitest.Deployments + "host/trench.yaml"})
	harness.Must(t, err)
	o, _, err := line.Run.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, false)
	harness.Must(t, err)
	if len(o.LoadBalancers) != 1 || o.LoadBalancers[0] != identity.UserID(uint32(os.Geteuid())) {
		t.Errorf("got %v", o.LoadBalancers)
	}
}
