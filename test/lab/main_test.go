package lab

import (
	"fmt"
	"os"
	"path/filepath"
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
