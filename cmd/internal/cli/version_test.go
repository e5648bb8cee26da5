package cli

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestVersionOfARelease(t *testing.T) {
	was := buildVersion
	defer func() { buildVersion = was }()
	buildVersion = "v1.2.3"
	if v := Version(); v != "v1.2.3" {
		t.Fatalf("Version() = %q", v)
	}
}

// TestLinkerSetsTheVersion guards a name that the linker ignores once it is wrong.
func TestLinkerSetsTheVersion(t *testing.T) {
	name := reflect.TypeFor[Output]().PkgPath() + ".buildVersion"
	for _, file := range []string{
		"tools/release/main.go", "deployments/images/lb.Dockerfile", "deployments/images/frontend.Dockerfile",
		"deployments/images/kube.Dockerfile", "deployments/images/target.Dockerfile",
	} {
		text, err := os.ReadFile(filepath.Join("../../..", file))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), name) {
			t.Errorf("%s does not name %s", file, name)
		}
	}
}
