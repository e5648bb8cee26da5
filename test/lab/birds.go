package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// birdsVariable is "all" where tests that run with each BIRD use newer ones, too, as in make proof.
const birdsVariable = "VIPGATE_TEST_BIRDS"

// BIRDs returns the versions of BIRD for tests that run with each one: Debian's, and with
// VIPGATE_TEST_BIRDS=all newer ones.
func BIRDs() []string {
	if os.Getenv(birdsVariable) == "all" {
		return []string{"2.0", "2.17", "3.4"}
	}
	return []string{"2.0"}
}

// NewerBIRD returns a version where tests run with newer ones, and Debian's elsewhere.
func NewerBIRD(version string) string {
	if birds := BIRDs(); !slices.Contains(birds, version) {
		return birds[0]
	}
	return version
}

// BIRDOf returns the executable of a version of BIRD such as "2.17", which test/setup/birds.sh
// unpacked, or of Debian's for "2.0"; "" without one. The working directory is that of a test in a
// folder of test/.
func BIRDOf(version string) (string, error) {
	if version == "2.0" {
		return BIRD(), nil
	}
	birds, err := filepath.Abs("../../bin/birds")
	if err != nil {
		return "", fmt.Errorf("BIRD %s: %w", version, err)
	}
	found, err := filepath.Glob(filepath.Join(birds, version+".*", "bird"))
	if len(found) == 0 {
		return "", err
	}
	if len(found) > 1 {
		return "", errors.New("several BIRDs of version " + version + " in " + birds)
	}
	return found[0], nil
}
