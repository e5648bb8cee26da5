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

	"github.com/vipgate/vipgate/test/lab"
)

// Design section 7: "Router id: always written … BIRD cannot find one on an IPv6-only host".
func TestIPv6OnlyHost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, dev := range []string{lab.External, lab.Internal} {
		w.must(w.Pod.IP("-4", "addr", "flush", "dev", dev))
	}
	w.must(w.pod.WriteTrench(fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%[1]q]
  gateways:
    - {name: gateway-a6, address: %[2]q}
streams:
  - name: stream-a
    vips: [%[1]q]
    check: {tcp: {port: %[4]d}, interval: 100ms, timeout: 100ms, rise: 1, fall: 2}
    targets:
      - {name: target-1, ips: [%[3]q]}
`, vipA6, lab.GatewayA6.String(), lab.Target1v6.String(), checkPort)))
	w.up(w.target1[1:])
	w.startPod()
	w.wantRoutes(vipA6)
	w.waitTable("-6", "default via "+lab.GatewayA6.String())
	m := regexp.MustCompile(`Neighbor ID: +(\S+)`).FindStringSubmatch(w.gatewaySays("show protocols all trench1"))
	if m == nil {
		t.Fatal("the gateway does not know our router id")
	}
	if id, err := netip.ParseAddr(m[1]); err != nil || !id.Is4() || id.IsUnspecified() {
		t.Errorf("the router id is %q: %v", m[1], err)
	}
	w.wantHealth(lab.FrontendHealth, "Readiness", healthServing)
}

// labVariable makes the test binary a maker of a laboratory that somebody kills.
const labVariable = "VIPGATE_TEST_LAB"

// TestLaboratoryToBeKilled is no test but the process that the next one kills.
func TestLaboratoryToBeKilled(t *testing.T) {
	ready := os.Getenv(labVariable)
	if ready == "" {
		return
	}
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	names := []string{w.Dir, w.Pod.Name(), w.Gateway.Name(), w.Backend.Name()}
	w.must(os.WriteFile(ready+".new", []byte(strings.Join(names, "\n")), 0o600))
	w.must(os.Rename(ready+".new", ready))
	<-t.Context().Done()
}

// Issue 2: "leftovers of a killed run": everything in a laboratory is someone's child, and kill -9 of that one leaves it
// behind. The next laboratory starts clean.
func TestLeftoversOfAKilledRunAreRemoved(t *testing.T) {
	t.Parallel()
	ready := t.TempDir() + "/ready"
	maker := exec.Command("/proc/self/exe", "-test.run=^TestLaboratoryToBeKilled$")
	maker.Env = append(os.Environ(), labVariable+"="+ready, binariesVariable+"="+binaries)
	out, err := os.Create(ready + ".log")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	maker.Stdout, maker.Stderr = out, out
	if err := maker.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = maker.Wait() }()
	t.Cleanup(func() { _ = maker.Process.Kill(); <-ended })
	bare := &world{t: t}
	var left []string
	bare.waitFor(func() error {
		b, err := os.ReadFile(ready)
		if errors.Is(err, fs.ErrNotExist) {
			log, _ := os.ReadFile(out.Name())
			return fmt.Errorf("the other laboratory is not ready: %s", log)
		}
		left = strings.Split(string(b), "\n")
		return err
	})
	processes := namespacesProcesses(t, left[1:])
	if len(processes) < 4 { // lb, frontend and two BIRDs
		t.Fatalf("the other laboratory has only processes %v", processes)
	}
	bare.must(maker.Process.Signal(syscall.SIGKILL))
	<-ended

	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	// Another laboratory that began at the same time may be removing them.
	w.waitFor(func() error {
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
			// What nobody waits for stays as a zombie (state Z, proc(5)).
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err == nil && !strings.HasPrefix(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " Z") {
				return fmt.Errorf("process %d still runs: %s", pid, stat)
			}
		}
		return nil
	})
}

// namespacesProcesses are the processes in namespaces, by name.
func namespacesProcesses(t *testing.T, names []string) []int {
	t.Helper()
	var pids []int
	for _, name := range names {
		out, err := exec.Command("ip", "netns", "pids", name).Output()
		if err != nil {
			t.Fatal(err)
		}
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
