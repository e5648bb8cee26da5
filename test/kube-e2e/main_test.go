package kubee2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

// binaries is the folder of kube, lb, frontend and vipgate, built once for all tests.
var binaries string

// leaks accepts the goroutine of an exec's SPDY connection at a kubelet. If the API server closes
// the connection first, it waits up to 1 s for a reader of its error, and cri-streaming has none.
func leaks(options ...goleak.Option) []goleak.Option {
	return append(options, goleak.IgnoreTopFunction("github.com/moby/spdystream.(*Connection).shutdown"))
}

// binariesVariable passes that folder to a nested run.
const binariesVariable = "VIPGATE_TEST_BINARIES"

func TestMain(m *testing.M) {
	if os.Getenv(kubernetes.Variable) == "0" {
		os.Exit(m.Run()) // the tests skip themselves
	}
	if binaries = os.Getenv(binariesVariable); binaries != "" {
		goleak.VerifyTestMain(m, leaks()...)
		return
	}
	// Named like the directory of a lab: if this run is killed, the next one removes it.
	dir, err := os.MkdirTemp("/tmp", fmt.Sprintf("vg-%d-", os.Getpid()))
	if err == nil {
		err = build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binaries = dir
	goleak.VerifyTestMain(m, leaks(goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		os.Exit(code)
	}))...)
}

func build(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	root, err := filepath.Abs("../..")
	if err != nil {
		return err
	}
	return lab.Build(ctx, root, dir, "./cmd/kube", "./cmd/vipgate")
}
