package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/vipgate/vipgate/cmd/internal/cli"
	"github.com/vipgate/vipgate/pkg/lb"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/registry"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/test/harness"
)

// parsed are the flags of targets out of a command line.
func parsed(t *testing.T, args ...string) (*targetFlags, error) {
	t.Helper()
	k := parser(t)
	if _, err := k.Parse(append([]string{"run"}, args...)); err != nil {
		return nil, err
	}
	line := k.Model.Target.Addr().Interface().(*commandLine)
	var refused cli.Refusals
	line.Run.targetFlags.check(&refused)
	return &line.Run.targetFlags, refused.Err()
}

func TestInvalidTargetFlags(t *testing.T) {
	for line, want := range map[string]string{
		"--source=files":                                      "--source=files: write file or registry",
		"--source=":                                           "--source",
		"--source=registry":                                   "name the SPIFFE IDs of targets with --target-id",
		"--target-id=spiffe://td/a":                           "add --source=registry",
		"--registry-address=127.0.0.1:7790":                   "add --source=registry",
		"--source=registry --registry-address=7790":           "write HOST:PORT",
		"--source=registry --registry-address=:7790":          "names no address",
		"--source=registry --registry-address=127.0.0.1:0":    `"0" is not a port`,
		"--target-subnet=172.16.0.1/16":                       "write 172.16.0.0/16",
		"--target-subnet=172.16":                              "is not a subnet",
		"--target-quota=0":                                    "at least 1",
		"--registry-grace=-1s":                                "must not be negative",
		"--registry-settle=2m":                                "--registry-settle=2m0s: at most 1m0s",
		"--registry-grace=999h":                               "--registry-grace=999h0m0s: at most 1h0m0s",
		"--probe-id=a://td/a":                                 "scheme is missing or invalid",
		"--probe-id=spiffe://td/a":                            "name the address with --registry-address",
		"--registry-address=[::1]:1 --probe-id=spiffe://td/a": "--probe-quorum=2: use 1 to 1",
		"--registry-address=[::1]:1 --probe-id=spiffe://td/a --probe-quorum=0":  "--probe-quorum=0: use 1 to 1",
		"--probe-id=spiffe://td/a --probe-id=spiffe://td/a":                     "it occurs twice",
		"--source=registry --target-id=spiffe://td/** --probe-id=spiffe://td/a": "lets it register targets, too",
		"--source=directory":                 "--source=directory: write file or registry",
		"--state-dir=":                       "--state-dir is empty",
		"--on-missing-file=keep":             "must be one of",
		"--source=registry --target-id=td/a": "is not a pattern of SPIFFE IDs",
	} {
		t.Run(line, func(t *testing.T) {
			_, err := parsed(t, strings.Fields(line)...)
			harness.WantError(t, err, want)
		})
	}
}

func TestFlagsOfTargetsBecomeOptions(t *testing.T) {
	f, err := parsed(t)
	harness.Must(t, err)
	defaults := lb.TargetOptions{
		File: true, OnFileGone: targetset.Hold, StateDir: "/run/vipgate/lb",
		Registry: registry.Options{
			Off: true, OnGone: targetset.Drain, Quota: registry.DefaultQuota, Grace: registry.DefaultGrace,
		},
		RegistrySettle: 6 * time.Second,
	}
	if d := cmp.Diff(defaults, f.options()); d != "" {
		t.Errorf("defaults (-want +got):\n%s", d)
	}
	f, err = parsed(t, strings.Fields("--source=registry --target-id=spiffe://td/a --on-registration-expiry=hold "+
		"--on-missing-file=drop "+
		"--target-subnet=172.16.0.0/16 --target-subnet=fd00::/8 "+
		"--registry-address=10.0.0.5:7790 --write-readiness-dir=/run/y --state-dir=/s --target-quota=3 "+
		"--registry-grace=1s --registry-settle=2s")...)
	harness.Must(t, err)
	o := f.options()
	r := o.Registry
	if o.File || r.Off || r.OnGone != targetset.Hold || r.Quota != 3 || r.Grace != time.Second || len(r.Allow) != 1 ||
		o.RegistrySettle != 2*time.Second ||
		o.OnFileGone != targetset.Drop || len(o.Subnets) != 2 ||
		o.RegistryAddr != "10.0.0.5:7790" || o.WriteReadinessDir != "/run/y" || o.StateDir != "/s" {
		t.Errorf("options %+v", o)
	}
}

// Hidden aliases of flags that were renamed.
func TestRenamedFlags(t *testing.T) {
	for _, tt := range []struct{ old, variable, value, renamed string }{
		{"--on-file-gone", "VIPGATE_ON_FILE_GONE", "drop", "--on-missing-file"},
		{"--on-registry-gone", "VIPGATE_ON_REGISTRY_GONE", "hold", "--on-registration-expiry"},
	} {
		t.Run(tt.old, func(t *testing.T) {
			want, err := parsed(t, tt.renamed+"="+tt.value)
			harness.Must(t, err)
			got, err := parsed(t, tt.old+"="+tt.value)
			if d := cmp.Diff(want.options(), got.options()); err != nil || d != "" {
				t.Errorf("by flag: %v (-want +got):\n%s", err, d)
			}
			t.Setenv(tt.variable, tt.value)
			for variable := range cli.Adopt(program().Aliases) {
				t.Cleanup(func() { os.Unsetenv(variable) })
			}
			got, err = parsed(t)
			if d := cmp.Diff(want.options(), got.options()); err != nil || d != "" {
				t.Errorf("by variable: %v (-want +got):\n%s", err, d)
			}
			var help strings.Builder
			k := parser(t)
			k.Stdout, k.Exit = &help, func(int) {}
			_, _ = k.Parse([]string{"run", "--help"})
			if !strings.Contains(help.String(), tt.renamed) || strings.Contains(help.String(), tt.old) {
				t.Errorf("the help does not hide %s", tt.old)
			}
		})
	}
}

// Each flag that names peers is the option of the same right.
func TestPeersBecomeOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trench.yaml")
	const trench = "trench: t\nattractor: {name: a, vips: [20.0.0.1/32], gateways: []}\nstreams: []\n"
	harness.Must(t, os.WriteFile(file, []byte(trench), 0o600))
	k := parser(t)
	if _, err := k.Parse([]string{
		"run", "--trench-file=" + file, "--identity=dev", "--dev-authority-dir=" + t.TempDir(),
		"--frontend-id=spiffe://a/f1", "--frontend-id=spiffe://a/f2", "--frontend-trust-domain=b",
		"--reader-id=spiffe://a/r", "--source=registry", "--target-id=s=spiffe://a/t/*",
		"--target-quota=3", "--socket-mode=0660",
	}); err != nil {
		t.Fatal(err)
	}
	line := k.Model.Target.Addr().Interface().(*commandLine)
	line.Run.ProbeID, line.Run.ProbeQuorum = []spiffeid.ID{spiffeid.RequireFromString("spiffe://a/p")}, 1
	line.Run.RegistryAddress = "127.0.0.1:7790"
	o, err := line.Run.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, true)
	harness.Must(t, err)
	got := fmt.Sprint(o.Frontends, o.FrontendDomain, o.Readers, o.Targets.Registry.Allow, o.Targets.Registry.Off,
		o.Targets.Registry.Quota, o.SocketMode, o.Probes, o.ProbeQuorum)
	const want = "[spiffe://a/f1 spiffe://a/f2] b [spiffe://a/r] [s=spiffe://a/t/*] false 3 -rw-rw---- [spiffe://a/p] 1"
	if got != want {
		t.Errorf("options %s, want %s", got, want)
	}
}
