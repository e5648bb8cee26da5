package style

import (
	"os/exec"
	"strings"
	"testing"
)

var (
	kubernetes = []string{"k8s.io/", "sigs.k8s.io/", "github.com/vipgate/vipgate/pkg/kube"}
	meridio    = []string{"github.com/vipgate/vipgate/pkg/meridio"}
)

// dependencies returns the packages with one of the prefixes that a package depends on.
func dependencies(t *testing.T, pkg string, prefixes []string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", pkg)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list -deps %s: %v", pkg, err)
	}
	var found []string
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		for _, prefix := range prefixes {
			if strings.HasPrefix(dep, prefix) {
				found = append(found, dep)
			}
		}
	}
	return found
}

// lb and frontend read a file, and target follows the kernel: none of them depends on Kubernetes
// (docs/adr/0025-kubernetes-writes-the-trench-file.md) or on code for Meridio 1.x.
func TestProgramsWithoutKubernetes(t *testing.T) {
	for pkg, prefixes := range map[string][]string{
		"./cmd/lb": append(meridio, kubernetes...), "./cmd/frontend": append(meridio, kubernetes...),
		"./cmd/target": append(meridio, kubernetes...), "./cmd/kube": meridio, "./cmd/meridio-frontend": kubernetes,
	} {
		if found := dependencies(t, pkg, prefixes); len(found) > 0 {
			t.Errorf("%s depends on %s", pkg, strings.Join(found, ", "))
		}
	}
	for pkg, prefixes := range map[string][]string{
		"./pkg/kube/v1alpha1": kubernetes, "./cmd/meridio-frontend": meridio,
	} {
		if len(dependencies(t, pkg, prefixes)) == 0 {
			t.Errorf("no dependency of %s is found where there must be some", pkg)
		}
	}
}
