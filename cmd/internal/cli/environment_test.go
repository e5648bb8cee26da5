package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func TestVariablesOfServices(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        bool
	}{
		{"VIPGATE_LB_SERVICE_HOST", "10.96.0.1", true},
		{"VIPGATE_LB_SERVICE_HOST", "fd00::1", true},
		{"VIPGATE_SERVICE_HOST", "10.96.0.1", true},
		{"VIPGATE_LB_SERVICE_PORT", "7790", true},
		{"VIPGATE_LB_SERVICE_PORT_REGISTRY", "7790", true},
		{"VIPGATE_LB_PORT", "tcp://10.96.0.1:7790", true},
		{"VIPGATE_PORT", "udp://[fd00::1]:53", true},
		{"VIPGATE_LB_PORT_7790_TCP", "tcp://10.96.0.1:7790", true},
		{"VIPGATE_LB_PORT_7790_SCTP_PROTO", "sctp", true},
		{"VIPGATE_LB_PORT_7790_TCP_PORT", "7790", true},
		{"VIPGATE_LB_PORT_7790_TCP_ADDR", "10.96.0.1", true},
		{"VIPGATE_HEALTH_PORT", "tcp://10.96.0.1:80", true}, // of the Service vipgate-health
		{"VIPGATE_HEALTH_PORT", "7780", false},
		{"VIPGATE_METRIC_PORT", "2223", false},
		{"VIPGATE_LB_SERVICE_HOST", "lb.example.com", false},
		{"VIPGATE_LB_SERVICE_PORT", "many", false},
		{"VIPGATE_LB_PORT_7790_TCP_PROTO", "http", false},
		{"VIPGATE_LB_PORT_X_TCP_PORT", "7790", false},
		{"VIPGATE_NSP_SERVICE", "nsp:7778", false},
		{"VIPGATE_REGISTRY", "tcp://10.96.0.1:7790", false},
	} {
		if got := ofService(c.name, c.value); got != c.want {
			t.Errorf("%s=%s: got %v", c.name, c.value, got)
		}
	}
}

func TestUnknownVariables(t *testing.T) {
	own := []string{"VIPGATE_LEASE", "VIPGATE_MARK"}
	for name, want := range map[string]string{
		"VIPGATE_LEASE": "", "VIPGATE_DATAPLANE": "", "VIPGATE_POOL": "", "VIPGATE_TRENCH": "", // of all programs
		"VIPGATE_ON_FILE_GONE": "", // of an alias
		"VIPGATE_TEST_KUBE":    "", "LEASE": "",
		"VIPGATE_DATAPLAN":  "did you mean VIPGATE_DATAPLANE?",
		"VIPGATE_LAESE":     "did you mean VIPGATE_LEASE?",
		"VIPGATE_MARKS":     "did you mean VIPGATE_MARK?",
		"VIPGATE_DRAIN":     "did you mean VIPGATE_DRAIN_TIME?",
		"VIPGATE_lease":     "no program of vipgate reads it",
		"VIPGATE_SOMETHING": "no program of vipgate reads it: remove it",
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "x")
			problems := unknownVariables(own)
			if want == "" && len(problems) > 0 || want != "" && (len(problems) != 1 ||
				!strings.HasPrefix(problems[0].Error(), "unknown variable "+name+"; "+want)) {
				t.Errorf("got %v, want %q", problems, want)
			}
		})
	}
}

// Every command except version refuses unknown variables, together with other errors. Variables of
// Services are ignored, even if they have the name of a flag's variable.
func TestEnvironmentOfMain(t *testing.T) {
	t.Setenv("VIPGATE_HEALTH_PORT", "tcp://10.96.0.1:80")
	for _, c := range []struct {
		line   string
		name   string
		status int
		stderr []string
	}{
		{"version", "VIPGATE_VERSIO", ExitOK, nil},
		{"serve", "VIPGATE_LB_SERVICE_HOST", ExitOK, nil},
		{"serve", "VIPGATE_DATAPLAN", ExitUsage, []string{"did you mean VIPGATE_DATAPLANE?\nTry"}},
		{"serve --health-port=x", "VIPGATE_DATAPLAN", ExitUsage, []string{"VIPGATE_DATAPLANE?\n", "--health-port: "}},
	} {
		t.Setenv(c.name, "10.96.0.1")
		var line struct {
			Version VersionCommand `cmd:""`
			Serve   serveCommand   `cmd:""`
		}
		file, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
		harness.Must(t, err)
		stderr := os.Stderr
		os.Stderr = file
		status := run(t.Context(), Program{Name: "test"}, &line, strings.Fields(c.line))
		os.Stderr = stderr
		text, err := os.ReadFile(file.Name())
		harness.Must(t, errors.Join(err, file.Close()))
		if status != c.status {
			t.Errorf("%s with %s: exit status %d: %s", c.line, c.name, status, text)
		}
		for _, want := range c.stderr {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s with %s: got %s, want %q", c.line, c.name, text, want)
			}
		}
		harness.Must(t, os.Unsetenv(c.name))
	}
}

type serveCommand struct {
	HealthPort uint16 `default:"7780"`
}

func (serveCommand) Run() error { return nil }
