package bird_test

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// systemBIRD runs the gateways, and the pod's BIRD unless birdVariable names another executable.
const (
	systemBIRD   = "/usr/sbin/bird"
	birdVariable = "VIPGATE_TEST_BIRD"
)

// birdExecutable is the BIRD of the pod.
var birdExecutable = cmp.Or(os.Getenv(birdVariable), systemBIRD)

// insideVariable marks the second process of the tests, which has its own namespaces.
const insideVariable = "VIPGATE_TEST_NAMESPACES"

// TestMain runs the tests in new network namespaces, since the Supervisor and its BIRD look at
// the interfaces of the whole process, and in new PID and mount namespaces: however the tests
// end, every BIRD that they started, and every namespace that they named, ends with them.
// A run of all tests is divided among processes (shards_test.go).
func TestMain(m *testing.M) {
	switch {
	case os.Geteuid() != 0: // each test that requires root checks for it
		goleak.VerifyTestMain(m)
	case os.Getenv(insideVariable) != "":
		if os.Getpid() == 1 { // not a frontend that a test started
			if err := ownMounts(); err != nil {
				fmt.Fprintln(os.Stderr, "mounts of the tests:", err)
				os.Exit(1)
			}
		}
		goleak.VerifyTestMain(m)
	default:
		flag.Parse()
		os.Exit(runAll())
	}
}

// ownMounts mounts a /proc of the tests' PID namespace and a private directory for names of
// network namespaces.
func ownMounts() error {
	const names = "/run/netns" // of iproute2
	if err := os.MkdirAll(names, 0o755); err != nil {
		return err
	}
	return errors.Join(
		unix.Mount("proc", "/proc", "proc", 0, ""),
		unix.Mount("tmpfs", names, "tmpfs", 0, ""),
	)
}

// runInside runs this program in new namespaces and returns its exit status.
func runInside(out io.Writer, args ...string) int {
	// Pdeathsig fires at the end of the thread that forked.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(out, err)
		return 1
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), insideVariable+"=1")
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   syscall.CLONE_NEWNET | syscall.CLONE_NEWPID,
		Unshareflags: syscall.CLONE_NEWNS, // for a separate /proc; mounts stay private
		Pdeathsig:    syscall.SIGKILL,
	}
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return max(1, exit.ExitCode())
	}
	fmt.Fprintln(out, "namespaces for the tests:", err)
	return 1
}
