package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/clitest"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const installed = "/usr/lib/vipgate/target"

// unit returns the values of a unit by their keys.
func unit(t *testing.T, file string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(file)
	harness.Must(t, err)
	values := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if key, value, ok := strings.Cut(line, "="); ok && !strings.HasPrefix(line, "#") {
			values[key] = append(values[key], value)
		}
	}
	return values
}

func TestUnitsFitProgram(t *testing.T) {
	for name, environment := range map[string]string{
		"vipgate-target.service":      "target.env",
		"vipgate-target-add@.service": "target-add.env",
	} {
		t.Run(name, func(t *testing.T) {
			u := unit(t, clitest.Deployments+"systemd/"+name)
			known := map[string]bool{}
			for _, f := range parser(t).Model.Leaves(true) {
				for _, flag := range f.Flags {
					for _, v := range flag.Envs {
						known[v] = true
					}
				}
			}
			for v, values := range unit(t, clitest.Deployments+"systemd/"+environment) {
				if t.Setenv(v, values[0]); !known[v] {
					t.Errorf("%s: nothing reads %s", environment, v)
				}
			}
			for _, assignment := range u["Environment"] {
				v, value, _ := strings.Cut(assignment, "=")
				if t.Setenv(v, strings.ReplaceAll(value, "%i", "web-1")); !known[v] {
					t.Errorf("nothing reads %s", v)
				}
			}
			words := strings.Fields(strings.ReplaceAll(u["ExecStart"][0], "%i", "web-1"))
			if _, err := parser(t).Parse(words[1:]); err != nil || words[0] != installed {
				t.Errorf("%v: %v", words, err)
			}
			if u["EnvironmentFile"][0] != "/etc/vipgate/"+environment {
				t.Errorf("environment files %q", u["EnvironmentFile"])
			}
		})
	}
}

var executable = regexp.MustCompile(`/usr/lib/vipgate/[a-z-]+`)

// systemd takes every unit without a warning.
func TestUnitsAreValid(t *testing.T) {
	lab.Need(t, "systemd-analyze")
	files, err := filepath.Glob(clitest.Deployments + "systemd/*.service")
	if err != nil || len(files) != 5 {
		t.Fatalf("units %v, %v", files, err)
	}
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for _, file := range files {
		text, err := os.ReadFile(file)
		harness.Must(t, err)
		copied := filepath.Join(dir, strings.Replace(filepath.Base(file), "@.", "@web-1.", 1))
		// systemd-analyze requires that the program of the unit exists.
		unit := executable.ReplaceAllString(string(text), os.Args[0])
		harness.Must(t, os.WriteFile(copied, []byte(unit), 0o600))
		args = append(args, copied)
	}
	out, err := exec.CommandContext(t.Context(), "systemd-analyze", args...).CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("%v: %s", err, out)
	}
}
