package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/pkg/readinessfile"
	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
)

const smallTrench = `trench: t
attractor: {name: a, vips: [20.0.0.1/32], gateways: [{name: g, address: 169.254.100.150}]}
`

// readinessOptions returns the options of `frontend run` with these arguments and variables.
func readinessOptions(t *testing.T, variables map[string]string, arguments ...string) (frontend.Options, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "trench.yaml")
	harness.Must(t, os.WriteFile(file, []byte(smallTrench), 0o600))
	c := clitest.Container{}
	for name, value := range variables {
		c.Env = append(c.Env, clitest.Env{Name: name, Value: value})
	}
	c.Environment(t)
	line := &commandLine{}
	if _, err := parserOf(t,
		line).Parse(append([]string{"run", "--trench-file=" + file, "--external-interface=lo"}, arguments...)); err != nil {
		t.Fatal(err)
	}
	o, _, err := line.Run.options(process.Settings{Log: slog.New(slog.DiscardHandler)}, false)
	return o, err
}

func TestAReadinessDirectoryNeedsNoIdentity(t *testing.T) {
	o, err := readinessOptions(t, nil, "--readiness-dir=/var/run/meridio", "--readiness-dir-missing=ready",
		"--readiness-max-age=5s", "--on-missing-directory=drain", "--drain-time=3s")
	harness.Must(t, err)
	if o.Identity != nil || o.Directory == nil {
		t.Fatalf("%+v", o)
	}
	d := *o.Directory
	d.Log = nil
	want := readinessfile.Options{
		Path: "/var/run/meridio", MissingReady: true, MaxAge: 5 * time.Second,
		OnGone: readinessfile.Drain, DrainTime: 3 * time.Second,
	}
	if d != want {
		t.Errorf("got %+v, want %+v", d, want)
	}
	if o, err = readinessOptions(t, map[string]string{"VIPGATE_READINESS_DIR": "/d"}); err != nil || o.Directory == nil ||
		o.Directory.OnGone != readinessfile.Drop || o.Directory.MissingReady {
		t.Errorf("by variable: %+v, %v", o.Directory, err)
	}
	o, err = readinessOptions(t, nil, "--readiness-dir=/d", "--on-directory-gone=hold") // the old name
	if err != nil || o.Directory.OnGone != readinessfile.Hold {
		t.Errorf("by the old name: %+v, %v", o.Directory, err)
	}
	if o, err = readinessOptions(t, nil, "--gating=off", "--readiness-dir=/d"); err != nil || o.Directory != nil {
		t.Errorf("without gating: %+v, %v", o.Directory, err)
	}
}

func TestBadReadinessDirectoriesAreRefused(t *testing.T) {
	for _, tt := range []struct {
		name      string
		variables map[string]string
		arguments []string
		want      string
	}{
		{"empty", nil, []string{"--readiness-dir="}, "--gating=off"},
		{"empty by variable", map[string]string{"VIPGATE_READINESS_DIR": ""}, nil, "an empty value is refused"},
		{"with a socket", nil, []string{"--readiness-dir=/d", "--lb-socket=unix:///run/lb.sock"}, "exclude each other"},
		{
			"with the default socket", nil,
			[]string{"--lb-socket=unix:///var/lib/meridio/lb.sock", "--readiness-dir=/d"},
			"exclude each other",
		},
		{
			"with a socket by variable",
			map[string]string{"VIPGATE_LB_SOCKET": "unix:///run/lb.sock"},
			[]string{"--readiness-dir=/d"},
			"exclude each other",
		},
		{"relative", nil, []string{"--readiness-dir=d"}, "absolute path"},
		{
			"too short an age", nil,
			[]string{"--readiness-dir=/d", "--readiness-max-age=1s"},
			"--readiness-max-age=1s: at least 2s",
		},
		{"negative age", nil, []string{"--readiness-dir=/d", "--readiness-max-age=-1s"}, "--readiness-max-age=-1s"},
		{"neither it nor an ID", nil, nil, "--lb-id"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := readinessOptions(t, tt.variables, tt.arguments...)
			harness.WantError(t, err, tt.want)
		})
	}
}
