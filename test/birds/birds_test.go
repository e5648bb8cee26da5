package birds

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// basicPath matches the tests of pkg/bird that every supported BIRD must pass: VIPs announced and
// withdrawn, sessions refused, lost and restored, kernel routes, reconfiguration, the end of an
// orphan.
const basicPath = "^(TestGatewayReceivesAnnouncedVIPs|TestGatewayWithoutHoldTimeIsRefused|" +
	"TestReconfigurationLeavesOtherSessionsUp|TestOrphanWithdrawsAndIsTerminated|" +
	"TestBFDEndsSessionBeforeTCP|TestRemovedKernelRoutesAreExportedAgain|TestNoDelay|TestImports|TestStatic.*)$"

// TestOtherVersions runs the basic path with each BIRD that test/setup/birds.sh unpacked.
func TestOtherVersions(t *testing.T) {
	tests := filepath.Join(t.TempDir(), "bird.test")
	build := exec.CommandContext(t.Context(), "go", "test", "-race", "-c", "-o", tests, "../../pkg/bird")
	build.Env = append(os.Environ(), "CGO_ENABLED=1") // the race detector needs cgo
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the tests of pkg/bird: %v\n%s", err, out)
	}
	versions := []string{"2.17", "2.20", "3.1", "3.4"}
	executables, outputs, results := make([]string, 4), make([][]byte, 4), make([]error, 4)
	// All versions run concurrently, in separate namespaces: the tests mostly wait for BGP timers.
	// t.Parallel would limit them to the number of processors.
	var running sync.WaitGroup
	for i, version := range versions {
		executable, err := lab.BIRDOf(version)
		harness.Must(t, err)
		if executable == "" {
			continue
		}
		executables[i] = executable
		cmd := exec.CommandContext(t.Context(), tests, "-test.run", basicPath)
		cmd.Dir = "../../pkg/bird"
		cmd.Env = append(os.Environ(), "VIPGATE_TEST_BIRD="+executable)
		running.Go(func() { outputs[i], results[i] = cmd.CombinedOutput() })
	}
	running.Wait()
	for i, version := range versions {
		t.Run(version, func(t *testing.T) {
			if executables[i] == "" {
				lab.Skip(t, "BIRD "+version+" (test/setup/birds.sh)")
			}
			if results[i] != nil {
				t.Errorf("with %s: %v\n%s", executables[i], results[i], outputs[i])
			}
		})
	}
}
