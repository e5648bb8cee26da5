package cli

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func TestVersionOfARelease(t *testing.T) {
	was := buildVersion
	defer func() { buildVersion = was }()
	buildVersion = "v1.2.3"
	if v := Version(); v != "v1.2.3" {
		t.Fatalf("Version() = %q", v)
	}
}

// TestLinkerSetsTheVersion guards the name of a variable, because the linker ignores unknown
// names.
func TestLinkerSetsTheVersion(t *testing.T) {
	name := reflect.TypeFor[Output]().PkgPath() + ".buildVersion"
	for _, file := range []string{
		"tools/release/main.go", "deployments/images/lb.Dockerfile", "deployments/images/frontend.Dockerfile",
		"deployments/images/kube.Dockerfile", "deployments/images/target.Dockerfile",
	} {
		text, err := os.ReadFile(filepath.Join("../../..", file))
		harness.Must(t, err)
		if !strings.Contains(string(text), name) {
			t.Errorf("%s does not name %s", file, name)
		}
	}
}

// The linker sets the commit. Otherwise, programs built with GOFLAGS=-buildvcs=false or from a
// clone of another user would have no commit.
func TestMakeSetsTheCommit(t *testing.T) {
	commit, err := exec.CommandContext(t.Context(), "git", "rev-parse", "--short=12", "HEAD").Output()
	if err != nil {
		lab.Skip(t, "a git clone: "+err.Error())
	}
	c := exec.CommandContext(t.Context(), "make", "--no-print-directory", "-C", "../../..", "-n", "build")
	c.Env = append(os.Environ(), "MAKEFLAGS=")
	out, err := c.CombinedOutput()
	name := reflect.TypeFor[Output]().PkgPath() + ".buildVersion"
	line := regexp.MustCompile(`-X ` + name + `=(\S*` + strings.TrimSpace(string(commit)) + `\S*|v\S+)' `)
	if err != nil || !line.Match(out) {
		t.Errorf("%v: the version is not set to %s:\n%s", err, commit, out)
	}
}
