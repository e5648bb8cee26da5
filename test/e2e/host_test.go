package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// BIRD finds no router id on an IPv6-only host (docs/bird.md#configuration).
func TestIPv6OnlyHost(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for _, dev := range []string{lab.External, lab.Internal} {
		f.must(f.Pod.IP("-4", "addr", "flush", "dev", dev))
	}
	f.must(f.pod.WriteTrench(fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%[1]q]
  gateways:
    %[2]s
streams:
  - name: stream-a
    vips: [%[1]q]
    check: {tcp: {port: %[4]d}, %[5]s}
    targets:
      - {name: target-1, ips: [%[3]q]}
`, vipA6, lineA6, lab.Target1v6.String(), checkPort, lab.CheckTimers)))
	f.up(f.target1[1:])
	f.startPod()
	f.wantRoutes(vipA6)
	f.waitTable("-6", "default via "+lab.GatewayA6.String())
	m := regexp.MustCompile(`Neighbor ID: +(\S+)`).FindStringSubmatch(f.waitGatewayState("show protocols all trench1"))
	if m == nil {
		t.Fatal("the gateway does not know our router id")
	}
	if id, err := netip.ParseAddr(m[1]); err != nil || !id.Is4() || id.IsUnspecified() {
		t.Errorf("the router id is %q: %v", m[1], err)
	}
	f.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
}

// labVariable makes the test binary the owner of a lab that TestLeftoversOfKilledRun kills.
const labVariable = "VIPGATE_TEST_LAB"

// TestLabToKill is not a test but the process that TestLeftoversOfKilledRun kills.
func TestLabToKill(t *testing.T) {
	ready := os.Getenv(labVariable)
	if ready == "" {
		return
	}
	f := newServing(t, 1)
	mounted := f.Dir + "/mounted"
	f.must(os.Mkdir(mounted, 0o700))
	f.must(unix.Mount("tmpfs", mounted, "tmpfs", 0, ""))
	names := []string{f.Dir, f.Pod.Name(), f.Gateway.Name(), f.Backend.Name()}
	f.must(os.WriteFile(ready+".new", []byte(strings.Join(names, "\n")), 0o600))
	f.must(os.Rename(ready+".new", ready))
	<-t.Context().Done()
}

// All processes of a lab are children of its owner or of each other, and remain after kill -9 of
// the owner. The next lab removes them at its start.
func TestLeftoversOfKilledRun(t *testing.T) {
	t.Parallel()
	ready := t.TempDir() + "/ready"
	owner := exec.Command("/proc/self/exe", "-test.run=^TestLabToKill$")
	owner.Env = append(os.Environ(), labVariable+"="+ready, lab.ProgramsVariable+"="+binaries)
	out, err := os.Create(ready + ".log")
	harness.Must(t, err)
	defer out.Close()
	owner.Stdout, owner.Stderr = out, out
	harness.Must(t, owner.Start())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = owner.Wait() }()
	t.Cleanup(func() { _ = owner.Process.Kill(); <-ended })
	bare := &fixture{t: t}
	var left []string
	bare.waitFor(func() error {
		b, err := os.ReadFile(ready)
		if errors.Is(err, fs.ErrNotExist) {
			log, _ := os.ReadFile(out.Name())
			return fmt.Errorf("the other lab is not ready: %s", log)
		}
		left = strings.Split(string(b), "\n")
		return err
	})
	processes := namespacesProcesses(t, left[1:])
	if len(processes) < 4 { // lb, frontend and two BIRDs
		t.Fatalf("the other lab has only processes %v", processes)
	}
	bare.must(owner.Process.Signal(syscall.SIGKILL))
	<-ended

	f := newServing(t, 1)
	// Another lab that started concurrently may be removing them.
	f.waitFor(func() error {
		paths := []string{left[0]}
		for _, name := range left[1:] {
			paths = append(paths, "/run/netns/"+name)
		}
		for _, path := range paths {
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%s was left behind: %v", path, err)
			}
		}
		for _, pid := range processes {
			// A process whose parent does not wait for it remains as a zombie (state Z, proc(5)).
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err == nil && !strings.HasPrefix(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " Z") {
				return fmt.Errorf("process %d still runs: %s", pid, stat)
			}
		}
		return nil
	})
}

// namespacesProcesses returns the processes in the named network namespaces.
func namespacesProcesses(t *testing.T, names []string) []int {
	t.Helper()
	var pids []int
	for _, name := range names {
		out, err := exec.Command("ip", "netns", "pids", name).Output()
		harness.Must(t, err)
		for _, word := range strings.Fields(string(out)) {
			var pid int
			if _, err := fmt.Sscan(word, &pid); err != nil {
				t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}
