package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// wantFiles waits until the readiness directory holds exactly names, or does not exist.
func (f *fixture) wantFiles(names ...string) {
	f.t.Helper()
	f.waitFor(func() error {
		entries, err := os.ReadDir(f.readinessDir())
		if err != nil && !(errors.Is(err, os.ErrNotExist) && len(names) == 0) {
			return err
		}
		var got []string
		for _, e := range entries {
			got = append(got, e.Name())
		}
		if strings.Join(got, " ") != strings.Join(names, " ") { // both sorted
			return fmt.Errorf("the directory has %q, want %q", got, names)
		}
		return nil
	})
}

// The lb writes readiness files and removes them at its start and exit, here for a frontend that
// reads them like a router of Meridio 2.
func TestReadinessFilesOfLBGateReader(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.makeReadinessDir()
	f.makeReadiness("lb-ready-stream-b", "lb-vip-ready-20.0.0.2") // a killed lb left them
	f.up(f.target1)
	f.must(f.pod.StartLB("--write-readiness-dir=" + f.readinessDir()))
	a := []string{"lb-ready-stream-a", "lb-vip-ready-20.0.0.1", "lb-vip-ready-2000::1"}
	f.wantFiles(a...)
	f.startDirectoryFrontend("--readiness-max-age=3s")
	f.wantRoutes(vipA4, vipA6)
	f.up(f.target2)
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	f.wantFiles(a...)

	// Files of a killed writer remain, and are no longer touched.
	f.must(f.pod.LB.Kill())
	f.wantRoutes()
	f.wantFiles(a...)
	f.must(f.pod.StartLB("--write-readiness-dir="+f.readinessDir(), noDrain))
	f.wantRoutes(vipA4, vipA6)
	f.stop(f.pod.LB)
	f.wantFiles()
	f.wantRoutes()
}

// A registration over TCP, with the same mTLS.
func TestTargetRegistersOverTCP(t *testing.T) {
	t.Parallel()
	const address = "172.16.0.1:7790" // the pod's address toward the targets
	f := newRegistryFixture(t, "--registry-address="+address)
	p, err := f.Start(f.Backend, "app-1", filepath.Join(binaries, "lb"), "target", "add", "app-1", "--stream=stream-a",
		"--ip="+lab.Target1v4.String(),
		"--registry="+address, "--lb-id="+lab.LBID, "--identity=dev", "--dev-authority-dir="+f.pod.Authority(),
		"--spiffe-id="+lab.AppID)
	f.must(err)
	f.wantRoutes(vipA4)
	mark := f.mark()
	f.stop(p)
	f.wantRoutes()
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	if out := p.Output(); !strings.Contains(out, "gone") {
		t.Errorf("it does not say that the target is gone:\n%s", out)
	}
}
