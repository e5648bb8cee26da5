package node

import (
	"os"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// variable is the environment variable with the folder of a run, which test/setup/test-node.sh
// creates. Without it the tests are skipped: they need the namespaces of that script.
const variable = "VIPGATE_TEST_NODE"

// folder returns the folder of the run.
func folder(t *testing.T) string {
	t.Helper()
	dir := os.Getenv(variable)
	if dir == "" {
		lab.Skip(t, "a kubelet, which make test-node provides")
	}
	return dir
}
