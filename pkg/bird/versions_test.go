package bird_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// basicPath are the tests that every supported BIRD has to pass: VIPs announced and withdrawn,
// sessions refused, lost and restored, kernel routes, reconfiguration, the end of an orphan.
const basicPath = "^(TestGatewayReceivesAnnouncedVIPs|TestGatewayWithoutHoldTimeIsRefused|" +
	"TestReconfigurationLeavesOtherSessionsUp|TestOrphanWithdrawsAndIsTerminated|" +
	"TestBFDEndsSessionBeforeTCP|TestRemovedKernelRoutesAreExportedAgain|TestNoDelay|TestStatic.*)$"

// TestOtherVersions runs them with each BIRD that test/setup/birds.sh unpacked.
func TestOtherVersions(t *testing.T) {
	if os.Getenv(birdVariable) != "" {
		t.Fatal("already a run with another BIRD")
	}
	birds, err := filepath.Abs("../../bin/birds")
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range []string{"2.17", "2.20", "3.1", "3.4"} {
		t.Run(version, func(t *testing.T) {
			found, err := filepath.Glob(filepath.Join(birds, version+".*", "bird"))
			if err != nil {
				t.Fatal(err)
			}
			if len(found) == 0 {
				lab.Skip(t, "BIRD "+version+" (test/setup/birds.sh)")
			}
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run", basicPath)
			// In namespaces of its own, beside the other versions.
			cmd.Env = append(os.Environ(), insideVariable+"=", birdVariable+"="+found[0])
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("with %s: %v\n%s", found[0], err, out)
			}
		})
	}
}
