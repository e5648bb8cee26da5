package kubee2e

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

// binaries is the folder of all programs.
var binaries string

// leaks accepts the goroutine of an exec's SPDY connection at a kubelet. If the API server closes
// the connection first, it waits up to 1 s for a reader of its error, and cri-streaming has none.
func leaks(options ...goleak.Option) []goleak.Option {
	return append(options, goleak.IgnoreTopFunction("github.com/moby/spdystream.(*Connection).shutdown"))
}

func TestMain(m *testing.M) {
	if os.Getenv(kubernetes.Variable) == "0" {
		os.Exit(m.Run()) // the tests skip themselves
	}
	var err error
	if binaries, err = lab.Programs(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(kubernetes.Main(m), leaks()...)
}
