package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestOnlyKubeImportsKubernetes keeps the Kubernetes modules out of lb, frontend and target.
func TestOnlyKubeImportsKubernetes(t *testing.T) {
	foreign := func(program string) (found []string) {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../"+program).CombinedOutput()
		if err != nil {
			t.Fatalf("go list: %v\n%s", err, out)
		}
		for name := range strings.FieldsSeq(string(out)) {
			if strings.HasPrefix(name, "k8s.io/") || strings.HasPrefix(name, "sigs.k8s.io/") ||
				strings.HasPrefix(name, "github.com/vipgate/vipgate/pkg/kube") {
				found = append(found, name)
			}
		}
		return found
	}
	for _, program := range []string{"lb", "frontend", "target"} {
		if found := foreign(program); len(found) > 0 {
			t.Errorf("cmd/%s imports %v", program, found)
		}
	}
	if len(foreign("kube")) == 0 {
		t.Error("cmd/kube imports nothing of Kubernetes: the test does not look at imports")
	}
}
