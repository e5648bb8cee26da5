package lab

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		// Glob only fails on a malformed pattern, and this one is well-formed.
		folders, _ := filepath.Glob(filepath.Join(tempDir, fmt.Sprintf("vg-%d-*", os.Getpid())))
		for _, folder := range folders {
			os.RemoveAll(folder)
		}
		os.Exit(code)
	}))
}

// targetBinary compiles target once and returns its folder. If this run is killed, the next one
// removes the folder.
var targetBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp(tempDir, fmt.Sprintf("vg-%d-", os.Getpid()))
	if err != nil {
		return "", err
	}
	c := exec.Command("go", "build", "-o", dir, "./cmd/target")
	c.Dir = "../.."
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build target: %w: %s", err, out)
	}
	return dir, nil
})
