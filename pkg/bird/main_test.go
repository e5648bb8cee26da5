package bird_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

const birdExecutable = "/usr/sbin/bird"

// insideVariable tells the second incarnation of the tests that it has a network
// namespace of its own.
const insideVariable = "VIPGATE_TEST_NETNS"

// TestMain runs the tests in a new network namespace: the Supervisor and its
// BIRD look at the interfaces of the whole process.
func TestMain(m *testing.M) {
	if os.Getenv(insideVariable) != "" || os.Geteuid() != 0 {
		goleak.VerifyTestMain(m)
		return
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// The tests end with us, also at a timeout of `go test`.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(err, &exit):
		os.Exit(max(1, exit.ExitCode()))
	}
	fmt.Fprintln(os.Stderr, "network namespace for the tests:", err)
	os.Exit(1)
}
