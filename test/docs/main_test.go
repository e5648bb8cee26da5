package docs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/lab"
)

const (
	// root is the folder of the repository.
	root = "../.."
	// waitTimeout bounds every wait. It detects a hang and is far above every expected duration.
	waitTimeout = 30 * time.Second
)

// binaries is the folder of lb and frontend, built once for all tests.
var binaries string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "vipgate-docs-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	sources, err := filepath.Abs(root)
	if err == nil {
		err = lab.Build(ctx, sources, dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binaries = dir
	if status := m.Run(); status != 0 {
		return status
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
