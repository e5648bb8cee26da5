package style

import (
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// module is the prefix of the import paths of vipgate.
const module = "github.com/vipgate/vipgate/"

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

const importFile = "testdata/imports.txt"

// floors has the rules of imports.txt.
type floors struct {
	sets  map[string][]string
	rules []floor
}

// floor denies a set of packages some imports.
type floor struct {
	set, reason     string
	denied, allowed []string
}

// readFloors reads imports.txt.
func readFloors(t *testing.T) floors {
	t.Helper()
	text, err := os.ReadFile(importFile)
	harness.Must(t, err)
	f := floors{sets: map[string][]string{}}
	for line := range strings.Lines(string(text)) {
		line, reason, _ := strings.Cut(strings.TrimSpace(line), " # ")
		words := strings.Fields(line)
		switch {
		case line == "" || line[0] == '#':
		case len(words) > 2 && words[0] == "set" && reason == "":
			f.sets[words[1]] = words[2:]
		case len(words) > 2 && words[0] == "deny" && reason != "" && f.sets[words[1]] != nil:
			rule, allowed := floor{set: words[1], reason: reason}, false
			for _, word := range words[2:] {
				switch name, isSet := strings.CutPrefix(word, "@"); {
				case word == "except":
					allowed = true
				case isSet && f.sets[name] != nil:
					rule.denied = append(rule.denied, f.sets[name]...)
				case isSet:
					t.Fatalf("%s: no set %s: %s", importFile, name, line)
				case allowed:
					rule.allowed = append(rule.allowed, word)
				default:
					rule.denied = append(rule.denied, word)
				}
			}
			f.rules = append(f.rules, rule)
		default:
			t.Fatalf("%s: invalid line: %s", importFile, line)
		}
	}
	return f
}

// contains reports whether a set has a package.
func (f floors) contains(set, pkg string) bool {
	in := false
	for _, member := range f.sets[set] {
		if excluded, ok := strings.CutPrefix(member, "!"); ok {
			in = in && covers(excluded, pkg) == 0
		} else {
			in = in || covers(member, pkg) > 0
		}
	}
	return in
}

// covers returns the length of pattern if it is path or above it, or else 0.
func covers(pattern, path string) int {
	exact, isExact := strings.CutPrefix(pattern, "=")
	if path == exact || !isExact && strings.HasPrefix(path, exact+"/") {
		return len(exact)
	}
	return 0
}

// longest returns the length of the longest pattern that matches path.
func longest(patterns []string, path string) (length int) {
	for _, pattern := range patterns {
		length = max(length, covers(pattern, path))
	}
	return length
}

// denials returns the reasons why a package must not import a path.
func (f floors) denials(pkg, path string) (reasons []string) {
	path = strings.TrimPrefix(path, module)
	for _, rule := range f.rules {
		if f.contains(rule.set, pkg) && longest(rule.denied, path) > longest(rule.allowed, path) {
			reasons = append(reasons, fmt.Sprintf("%s (rule of set %s)", rule.reason, rule.set))
		}
	}
	return reasons
}

// TestImports checks each import of the product.
func TestImports(t *testing.T) {
	f := readFloors(t)
	for name, members := range f.sets {
		for _, member := range members {
			folder := strings.TrimPrefix(member, "!")
			if info, err := os.Stat(filepath.Join(root, folder)); err != nil || !info.IsDir() {
				t.Errorf("%s: set %s has %s, which is not a folder", importFile, name, folder)
			}
		}
	}
	checked := 0
	for _, file := range goFiles(t) {
		if strings.HasSuffix(file, "_test.go") || !f.contains("product", filepath.Dir(file)) {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.ImportsOnly)
		harness.Must(t, err)
		for _, spec := range tree.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			harness.Must(t, err)
			checked++
			for _, reason := range f.denials(filepath.Dir(file), path) {
				t.Errorf("%s imports %s: %s", file, path, reason)
			}
		}
	}
	if checked < 1000 {
		t.Errorf("only %d imports found", checked)
	}
}

// Each rule denies an import that it was written for, and permits similar ones.
func TestImportRules(t *testing.T) {
	f := readFloors(t)
	denied := map[string]bool{}
	for _, c := range []struct{ pkg, path, reason string }{
		{"pkg/vip", module + "pkg/trench", "base packages import only"},
		{"pkg/vip", module + "pkg/nlmsg", ""},
		{"pkg/vip", "net/netip", ""},
		{"pkg/trench/file", module + "pkg/dataplane/plan", "belongs to lb"},
		{"pkg/trench/file", module + "pkg/gate", "belongs to frontend"},
		{"pkg/trench/file", module + "pkg/vip", ""},
		{"pkg/bird", module + "pkg/lb", "belongs to lb"},
		{"pkg/meridio/nsp", module + "pkg/serving", "belongs to lb"},
		{"pkg/healthcheck", module + "pkg/gate", "belongs to frontend"},
		{"pkg/healthcheck", module + "pkg/gatewayconfig", ""},
		{"pkg/sidecar", module + "pkg/registry", "belongs to lb"},
		{"pkg/sidecar", module + "pkg/bird/path", "belongs to frontend"},
		{"pkg/sidecar", module + "pkg/replypath", ""},
		{"pkg/replypath", module + "pkg/trench", "only base packages"},
		{"pkg/replypath", module + "pkg/returning", ""},
		{"cmd/lb", module + "pkg/replypath", "belongs to target"},
		{"cmd/lb", module + "pkg/sidecar", "only cmd/target"},
		{"cmd/lb", module + "pkg/sidecar/x", ""},
		{"cmd/target", module + "pkg/sidecar", ""},
		{"pkg/status", module + "pkg/lb", "only cmd/lb"},
		{"pkg/kube", module + "pkg/frontend", "only programs"},
		{"cmd/lb", module + "pkg/lb", ""},
		{"pkg/gate", module + "pkg/trench", "the gate imports only"},
		{"pkg/gate", module + "pkg/vip", ""},
		{"pkg/policy", "os/exec", "no I/O"},
		{"pkg/policy", "net", "no I/O"},
		{"pkg/policy", "net/netip", ""},
		{"pkg/turns", "sync/atomic", "no goroutine"},
		{"pkg/bird", module + "test/lab", "not part of the product"},
		{"cmd/lb", "testing", "not part of the product"},
		{"cmd/lb", "k8s.io/api/core/v1", "only kube and vipgate"},
		{"cmd/kube", "k8s.io/api/core/v1", ""},
		{"cmd/lb", module + "pkg/pods", "only cmd/vipgate"},
		{"cmd/lb", module + "pkg/kube/v1alpha1", "only cmd/kube"},
		{"cmd/frontend", module + "pkg/meridio/nsp", "only cmd/meridio-frontend"},
		{"cmd/meridio-frontend", module + "pkg/meridio/nsp", ""},
		{"pkg/gate", "go.opentelemetry.io/otel", "knows OpenTelemetry"},
		{"pkg/tracing", "go.opentelemetry.io/otel", ""},
		{"pkg/lb", module + "pkg/tracing", "only programs import it"},
		{"cmd/lb", module + "pkg/tracing", ""},
		{"pkg/lb", "github.com/alecthomas/kong", "flags belong to cmd"},
	} {
		reasons := f.denials(c.pkg, c.path)
		if c.reason == "" && len(reasons) > 0 || c.reason != "" && !strings.Contains(strings.Join(reasons, "\n"), c.reason) {
			t.Errorf("%s imports %s: got %q, want %q", c.pkg, c.path, reasons, c.reason)
		}
		for _, reason := range reasons {
			denied[reason] = true
		}
	}
	for _, rule := range f.rules {
		if !denied[fmt.Sprintf("%s (rule of set %s)", rule.reason, rule.set)] {
			t.Errorf("no case of this test breaks a rule of set %s: %s", rule.set, rule.reason)
		}
	}
}
