package install

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const root = "../.."

// timeout bounds the creation of the root, which downloads packages; commandTimeout each command.
const timeout, commandTimeout = 15 * time.Minute, time.Minute

// machine is a running systemd in namespaces of its own.
type machine struct {
	init string // process ID of systemd
	dir  string // its files, as the test sees them
}

// boot boots a machine from the cached root. Of mounts, each folder of this machine is followed by
// its path there.
func boot(t *testing.T, mounts ...string) *machine {
	t.Helper()
	lab.Need(t, "mmdebstrap")
	lower, err := filepath.Abs(root + "/bin/install-root")
	harness.Must(t, err)
	command(t, "./root.sh", lower)
	// Short, and unique: the name is the cgroup's, too.
	dir, err := os.MkdirTemp("/tmp", fmt.Sprintf("vipgate-machine-%d-", os.Getpid()))
	harness.Must(t, err)
	cmd := exec.Command("./boot.sh", append([]string{lower, dir}, mounts...)...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &out, commandTimeout
	// unshare ends with the test, and systemd with unshare.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	harness.Must(t, cmd.Start())
	m := &machine{dir: dir}
	t.Cleanup(func() { harness.Check(t, m.end(cmd)) })
	ctx := harness.Context(t, commandTimeout)
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid)
	err = lab.Eventually(ctx, 50*time.Millisecond, func() error {
		child, err := os.ReadFile(children)
		if err != nil {
			return err
		}
		m.init = strings.TrimSpace(string(child))
		name, err := os.ReadFile("/proc/" + m.init + "/comm")
		if err != nil || strings.TrimSpace(string(name)) != "systemd" {
			return fmt.Errorf("process %q is %q, not systemd: %w: %s", m.init, name, err, out.String())
		}
		state, err := m.run(ctx, "systemctl is-system-running")
		if state = strings.TrimSpace(state); state != "running" && state != "degraded" {
			return fmt.Errorf("systemd is %q: %w", state, err)
		}
		return nil
	})
	harness.Must(t, err)
	return m
}

// end ends all processes of the machine, and removes its files and its cgroup.
func (m *machine) end(cmd *exec.Cmd) error {
	if pid, err := strconv.Atoi(m.init); err == nil && pid > 1 {
		// All processes of a PID namespace end with its first one.
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // killed
	mounts, err := os.ReadFile("/proc/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); fields[2] == "cgroup2" {
			err = removeGroups(filepath.Join(fields[1], filepath.Base(m.dir)))
			break
		}
	}
	return errors.Join(err, os.Remove(m.dir))
}

// removeGroups removes a cgroup and those in it, from which the processes may still leave.
func removeGroups(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeGroups(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	return lab.Eventually(ctx, 10*time.Millisecond, func() error { return os.Remove(dir) })
}

// home is the home directory of the machine's root.
const home = "/root"

// run runs a script in the machine.
func (m *machine) run(ctx context.Context, script string) (string, error) {
	cmd := exec.CommandContext(ctx, "nsenter", "--target", m.init, "--mount", "--uts", "--ipc", "--net", "--pid",
		"--cgroup", "--root", "env", "-i", "-C", home, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
		"DEBIAN_FRONTEND=noninteractive", "HOME="+home, "bash", "-euo", "pipefail", "-c", script)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// command runs a program of the machine that tests.
func command(t *testing.T, args ...string) {
	t.Helper()
	ctx := harness.Context(t, timeout)
	if out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// home returns the path by which this machine reaches a file in the home of root in m.
func (m *machine) home(file string) string {
	return filepath.Join("/proc", m.init, "root", "root", file)
}
