package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// wantFiles waits until the readiness directory holds exactly these, or is gone.
func (w *world) wantFiles(names ...string) {
	w.t.Helper()
	w.waitFor(func() error {
		entries, err := os.ReadDir(w.readinessDir())
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

// Issue 4: "Our LB can write them as well, removed on exit and at start", here for
// a frontend that reads them, in the place of a router of Meridio 2.
func TestFilesThatOurLBWritesGateTheReader(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.makeReadinessDir()
	w.makeReadiness("lb-ready-stream-b", "lb-vip-ready-20.0.0.2") // a killed lb left them
	w.up(w.target1)
	w.must(w.pod.StartLB("--write-readiness-dir="+w.readinessDir(), "--drain-time=1s"))
	a := []string{"lb-ready-stream-a", "lb-vip-ready-20.0.0.1", "lb-vip-ready-2000::1"}
	w.wantFiles(a...)
	w.startDirectoryFrontend("--readiness-max-age=3s")
	w.wantRoutes(vipA4, vipA6)
	w.up(w.target2)
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.down(w.target2)
	w.wantRoutes(vipA4, vipA6)
	w.wantFiles(a...)

	// A writer that is killed leaves its files; they are no longer touched.
	w.must(w.pod.LB.Kill())
	w.wantRoutes()
	w.wantFiles(a...)
	w.must(w.pod.StartLB("--write-readiness-dir=" + w.readinessDir()))
	w.wantRoutes(vipA4, vipA6)
	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.LB, 0)
	w.wantFiles()
	w.wantRoutes()
}

// A registration over TCP, with the same mTLS.
func TestTargetRegistersOverTCP(t *testing.T) {
	t.Parallel()
	const address = "172.16.0.1:7790" // the pod's address toward the targets
	w := registryWorld(t, "--registry-address="+address)
	p, err := w.Start(w.Backend, "app-1", filepath.Join(binaries, "lb"), "target", "add", "app-1", "--stream=stream-a", "--ip="+lab.Target1v4.String(),
		"--registry="+address, "--lb-id="+lab.LBID, "--identity=dev", "--dev-authority-dir="+w.pod.Authority(), "--spiffe-id="+lab.AppID)
	w.must(err)
	w.wantRoutes(vipA4)
	mark := w.mark()
	w.must(p.Signal(syscall.SIGTERM))
	w.wantExit(p, 0)
	w.wantRoutes()
	w.wantStory(mark, vipA4, depreferred, withdrawn)
	if out := p.Output(); !strings.Contains(out, "gone") {
		t.Errorf("it does not say that the target is gone:\n%s", out)
	}
}
