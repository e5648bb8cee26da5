package lab

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

// ProgramsVariable is the environment variable with the result of [Programs]. `make test` sets it.
const ProgramsVariable = "VIPGATE_TEST_BINARIES"

// Programs returns the folder of the programs that test/setup/programs.sh builds. It runs the
// script unless [ProgramsVariable] is set, without a time limit: a cold build takes minutes.
var Programs = sync.OnceValues(func() (string, error) {
	dir := os.Getenv(ProgramsVariable)
	if dir == "" {
		root, err := repository()
		if err != nil {
			return "", err
		}
		if out, err := exec.Command(filepath.Join(root, programsScript)).CombinedOutput(); err != nil {
			return "", fmt.Errorf("build the programs of the tests: %w: %s", err, out)
		}
		dir = filepath.Join(root, "bin", "test")
	}
	// A cached test result is valid only for the same programs.
	if _, err := os.ReadFile(filepath.Join(dir, "sums")); err != nil {
		return "", fmt.Errorf("programs of the tests: %w; run %s", err, programsScript)
	}
	return dir, nil
})

const programsScript = "test/setup/programs.sh"

// repository returns the root of the repository of the running test.
func repository() (string, error) {
	working, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := working; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, programsScript)); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not in a clone of vipgate: no %s", working, programsScript)
		}
	}
}
