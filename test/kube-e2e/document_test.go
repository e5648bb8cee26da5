package kubee2e

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
)

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// The objects in docs/kubernetes.md are valid: the API server accepts each object, including the
// schema of the Trench, and so does the translation.
func TestObjectsOfTheDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/kubernetes.md")
	harness.Must(t, err)
	t.Parallel()
	c := kubernetes.Start(t)
	for _, name := range append(slices.Clone(definitions), "deployments/example/namespace.yaml") {
		manifest, err := os.ReadFile("../../" + name)
		harness.Must(t, err)
		c.Apply(t, string(manifest))
	}
	var trenches []string
	others := ""
	for _, block := range yamlBlock.FindAllStringSubmatch(string(text), -1) {
		c.Apply(t, block[1])
		if strings.Contains(block[1], "kind: Trench\n") {
			trenches = append(trenches, block[1])
		} else {
			others += "---\n" + block[1]
		}
	}
	services := 0
	for _, trench := range trenches {
		var o translation.Objects
		harness.Must(t, o.Read(strings.NewReader(trench+"\n"+others)))
		r := translation.Translate(o, translation.Options{KeyDir: "/etc/vipgate/trench/keys"})
		if r.File == nil || !r.Trench.Accepted {
			t.Errorf("Trench: %s: %s", r.Trench.Reason, r.Trench.Message)
		}
		for _, s := range r.Services {
			if services++; !s.Accepted {
				t.Errorf("Service %s: %s: %s", s.Object.Name, s.Reason, s.Message)
			}
		}
	}
	if len(trenches) != 2 || services != 1 {
		t.Errorf("%d Trenches and %d Services of theirs", len(trenches), services)
	}
}
