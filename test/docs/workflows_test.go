package docs

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/vipgate/vipgate/test/harness"
)

var (
	pinnedPattern = regexp.MustCompile(`^\S+@[0-9a-f]{40}$`)
	// secretsPattern also matches "secrets: inherit" and toJSON(secrets).
	secretsPattern = regexp.MustCompile(`\bsecrets\b`)
)

// TestWorkflows checks what CONTRIBUTING.md promises: a tag of an action can be moved, a commit
// cannot, a job that needs to write asks for that itself, and builds nothing of the project: the
// dependencies of a build would have its rights and secrets.
func TestWorkflows(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, ".github/workflows/*.yml"))
	harness.Must(t, err)
	if len(files) == 0 {
		t.Fatal("no workflow found")
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		harness.Must(t, err)
		var workflow struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				Permissions map[string]string
				Uses        string
				Steps       []struct{ Uses, Run string }
			}
		}
		var whole map[string]any
		harness.Must(t, errors.Join(yaml.Unmarshal(text, &workflow), yaml.Unmarshal(text, &whole)))
		jobs, _ := whole["jobs"].(map[string]any)
		delete(whole, "jobs")
		if secretsPattern.MatchString(fmt.Sprint(whole)) {
			t.Errorf("%s gives a secret to every job", file)
		}
		if len(workflow.Permissions) == 0 {
			t.Errorf("%s does not limit the permissions of its token", file)
		}
		for scope, access := range workflow.Permissions {
			if access != "read" {
				t.Errorf("%s: the token may %s %s in every job", file, access, scope)
			}
		}
		for name, job := range workflow.Jobs {
			trusted := slices.Contains(slices.Collect(maps.Values(job.Permissions)), "write") ||
				secretsPattern.MatchString(fmt.Sprint(jobs[name]))
			builds := job.Uses != "" // steps that this test does not read
			for _, step := range job.Steps {
				builds = builds || strings.Contains(step.Run, "make ")
				if step.Uses != "" && !pinnedPattern.MatchString(step.Uses) {
					t.Errorf("%s: job %s: %s is not pinned by its commit", file, name, step.Uses)
				}
			}
			if trusted && builds {
				t.Errorf("%s: job %s builds with the right to write or a secret", file, name)
			}
		}
	}
}

func TestSecretsPattern(t *testing.T) {
	for text, want := range map[string]bool{
		"map[uses:./a.yml secrets:inherit]": true, "${{ secrets.KEY }}": true, "${{ secrets['KEY'] }}": true,
		"${{ toJSON(secrets) }}": true, "run: make nosecrets": false, "run: scan mysecrets_list": false,
	} {
		if got := secretsPattern.MatchString(text); got != want {
			t.Errorf("%s: %t, want %t", text, got, want)
		}
	}
}
