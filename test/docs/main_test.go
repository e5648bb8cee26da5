package docs

import (
	"fmt"
	"os"
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

// binaries is the folder of all programs.
var binaries string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if binaries, err = lab.Programs(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if status := m.Run(); status != 0 {
		return status
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
