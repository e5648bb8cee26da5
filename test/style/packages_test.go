package style

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

var remedyPattern = regexp.MustCompile(`Debian: apt-get install ([a-z0-9+.-]+)`)

// Every package that a skipped test names is one that `make test` or `make proof` installs.
func TestSkippedTestsNameInstalledPackages(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "test/setup/packages.txt"))
	harness.Must(t, err)
	var installed []string
	for line := range strings.Lines(string(text)) {
		if group, packages, ok := strings.Cut(line, ": "); ok && !strings.HasPrefix(group, "#") {
			installed = append(installed, strings.Fields(packages)...)
		}
	}
	named := map[string]string{}
	for _, name := range lab.DebianPackages() {
		named[name] = "test/lab"
	}
	for _, file := range goFiles(t) {
		text, err := os.ReadFile(filepath.Join(root, file))
		harness.Must(t, err)
		for _, match := range remedyPattern.FindAllStringSubmatch(string(text), -1) {
			named[match[1]] = file
		}
	}
	if len(named) < 15 {
		t.Errorf("only %d packages found: %v", len(named), named)
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		if !slices.Contains(installed, name) {
			t.Errorf("%s names the package %s, which is not in test/setup/packages.txt", named[name], name)
		}
	}
}
