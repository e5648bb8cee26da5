package style

import (
	"os/exec"
	"strings"
	"testing"
)

// kubernetes returns the packages of Kubernetes and of kube that a package depends on.
func kubernetes(t *testing.T, pkg string) []string {
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
		for _, prefix := range []string{"k8s.io/", "sigs.k8s.io/", "github.com/vipgate/vipgate/pkg/kube"} {
			if strings.HasPrefix(dep, prefix) {
				found = append(found, dep)
			}
		}
	}
	return found
}

// lb and frontend read a file, and target follows the kernel: none of them depends on Kubernetes
// (docs/adr/0025-kubernetes-writes-the-trench-file.md).
func TestProgramsWithoutKubernetes(t *testing.T) {
	for _, pkg := range []string{"./cmd/lb", "./cmd/frontend", "./cmd/target"} {
		if found := kubernetes(t, pkg); len(found) > 0 {
			t.Errorf("%s depends on %s", pkg, strings.Join(found, ", "))
		}
	}
	if len(kubernetes(t, "./pkg/kube/v1alpha1")) == 0 {
		t.Error("no package of Kubernetes is found where there must be some")
	}
}
