package translation

import (
	"os"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// The admission policies know every annotation, or they would warn of it.
func TestAnnotationsAreAdmitted(t *testing.T) {
	policies, err := os.ReadFile("../../../deployments/kubernetes/admission.yaml")
	harness.Must(t, err)
	_, list, _ := strings.Cut(string(policies), "!(name in")
	for _, name := range annotations {
		if !strings.Contains(list, `"`+name+`"`) {
			t.Errorf("admission.yaml lacks %s", name)
		}
	}
}
