package kubee2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

var updateFRRK8s = flag.Bool("update", false, "write test/e2e/testdata/frr-k8s instead of comparing it")

// TestFRRK8sRenders merges FRRConfigurations with the controller of frr-k8s: MetalLB's alone, with
// that of the chart, and with that of a second trench. The text is what FRR loads in test/e2e.
// The result depends on files only, so that the controller need not run, or be built, while they
// are the same as when it last ran.
func TestFRRK8sRenders(t *testing.T) {
	const controller = "../../bin/tools/frr-k8s-controller"
	if _, err := os.Stat(controller); err != nil {
		wantRendered(t, "make bin/tools/frr-k8s-controller, and run this test with -update")
		return
	}
	f := newCluster(t)
	f.installFRRK8s()
	f.cluster.Apply(t, f.manifest(frrK8sData+"metallb.yaml"))
	dir := t.TempDir()
	conf, reloader := filepath.Join(dir, "frr.conf"), filepath.Join(dir, "reloader.pid")
	sleep := exec.Command("sh", "-c", "trap '' HUP; exec sleep infinity")
	f.must(sleep.Start())
	t.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
	f.must(os.WriteFile(reloader, fmt.Append(nil, sleep.Process.Pid), 0o600))
	command := exec.Command(controller, "--node-name=node-1", "--namespace="+frrK8sNamespace,
		"--metrics-bind-address=0", "--health-probe-bind-address=0", "--bgp-debounce-timeout=100")
	command.Env = append(os.Environ(), "KUBECONFIG="+f.cluster.Kubeconfig(t, f.cluster.Admin()),
		"FRR_CONFIG_FILE="+conf, "FRR_RELOADER_PID_FILE="+reloader)
	var log strings.Builder
	command.Stdout, command.Stderr = &log, &log
	f.must(command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})

	vipgate := f.manifest(frrK8sData + "vipgate.yaml")
	second := strings.NewReplacer("vipgate-trench-a-trench-a", "vipgate-trench-b-trench-b", "169.254.100.1",
		"169.254.100.2", "20.0.0.1", "20.0.1.1", "2000::1", "2000::2").Replace(vipgate)
	for _, step := range []struct{ manifest, neighbor, golden string }{
		{"", "neighbor 192.0.2.1 ", "metallb.conf"},
		{vipgate, "neighbor 169.254.100.1 ", "vipgate.conf"},
		{second, "neighbor 169.254.100.2 ", "two.conf"},
	} {
		if step.manifest != "" {
			f.cluster.Apply(t, step.manifest)
		}
		var text []byte
		f.wait(func(context.Context) (err error) {
			text, err = os.ReadFile(conf)
			if err == nil && !strings.Contains(string(text), step.neighbor) {
				err = errors.New("not rendered yet")
			}
			return err
		})
		got := hostname.ReplaceAllString(string(text), "hostname node-1")
		golden := filepath.Join("../..", frrK8sData, step.golden)
		if *updateFRRK8s {
			f.must(os.WriteFile(golden, []byte(got), 0o644))
		}
		if got != f.manifest(frrK8sData+step.golden) {
			t.Errorf("%s differs (-update writes it); rendered:\n%s", golden, got)
		}
	}
	if *updateFRRK8s {
		f.must(os.WriteFile(frrK8sSums, []byte(sums(t)), 0o644))
	}
	wantRendered(t, "run this test with -update")
}

// frrK8sSums has the checksums of the files that determine what the controller renders, and of its
// results.
const frrK8sSums = "../../" + frrK8sData + "rendered.sha256"

// sums returns the checksums of the files, as the program sha256sum prints them.
func sums(t *testing.T) string {
	t.Helper()
	command := exec.CommandContext(t.Context(), "bash", "-c", "LC_ALL=C; sha256sum tools/frr-k8s/go.* "+
		"test/kube-e2e/frrk8s_renders_test.go "+frrK8sData+"*.{conf,yaml}")
	command.Dir = "../.."
	out, err := command.Output()
	harness.Must(t, err)
	return string(out)
}

// wantRendered fails the test if a file has changed since the controller ran.
func wantRendered(t *testing.T, remedy string) {
	t.Helper()
	want, err := os.ReadFile(frrK8sSums)
	harness.Must(t, err)
	if got := sums(t); got != string(want) {
		t.Errorf("%s differs: %s. The files have\n%s", frrK8sSums, remedy, got)
	}
}

var hostname = regexp.MustCompile(`(?m)^hostname .*$`)
