package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

var (
	referencePattern = regexp.MustCompile(`\bdocs/([a-z0-9/._-]+\.md)(?:#([a-z0-9-]+))?`)
	// strayPattern matches references to documents that are not in the repository.
	strayPattern = regexp.MustCompile(`(?i)\bdesign,? section \d+|\bsections? \d+( and \d+)? of the design|\bissue #?\d+`)
)

// TestReferencesInSources checks that every document and heading that a source file
// names exists.
func TestReferencesInSources(t *testing.T) {
	list := exec.CommandContext(t.Context(), "git", "-C", root, "ls-files", "*.go", "*.proto", "*.sh", "*.yaml")
	out, err := list.Output()
	if err != nil {
		lab.Skip(t, "a Git repository: "+err.Error())
	}
	anchors, found := map[string]map[string]bool{}, 0
	for _, name := range strings.Fields(string(out)) {
		text, err := os.ReadFile(filepath.Join(root, name))
		harness.Must(t, err)
		for i, line := range strings.Split(string(text), "\n") {
			if stray := strayPattern.FindString(line); stray != "" {
				t.Errorf("%s:%d: %q is in no document of the repository", name, i+1, stray)
			}
			for _, m := range referencePattern.FindAllStringSubmatch(line, -1) {
				found++
				path := filepath.Join(root, "docs", m[1])
				if anchors[path] == nil {
					if _, err := os.Stat(path); err != nil {
						t.Errorf("%s:%d: %s: %v", name, i+1, m[0], err)
						continue
					}
					anchors[path] = read(t, path).anchors()
				}
				if m[2] != "" && !anchors[path][m[2]] {
					t.Errorf("%s:%d: %s: no such heading", name, i+1, m[0])
				}
			}
		}
	}
	if found < 40 {
		t.Errorf("found only %d references", found)
	}
}
