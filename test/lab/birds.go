package lab

import (
	"errors"
	"fmt"
	"path/filepath"
)

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
