package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// `frontend explain` names each broken step of a VIP with its remedy, and asks lb where it may.
func TestExplain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.startPod(shortDrain, shortSettle)
	f.wantRoutes(vipA4, vipA6)
	// Both sockets are in one folder with their default names.
	folder, err := os.MkdirTemp("", "vg-explain-")
	f.must(err)
	t.Cleanup(func() { f.must(os.RemoveAll(folder)) })
	f.must(os.Symlink(f.pod.FrontendAdmin(), filepath.Join(folder, "frontend.sock")))
	f.must(os.Symlink(f.pod.LBAdmin(), filepath.Join(folder, "lb.sock")))
	want := func(status int, vip string, parts ...string) {
		t.Helper()
		f.waitFor(func() error {
			out, got := f.run("frontend", "explain", vip, "--admin-socket="+filepath.Join(folder, "frontend.sock"))
			line := strings.Join(strings.Fields(out), " ") // the columns depend on the longest cell
			for _, part := range parts {
				if got != status || !strings.Contains(line, part) {
					return fmt.Errorf("exit status %d, want %d and %q:\n%s", got, status, part, out)
				}
			}
			return nil
		})
	}

	want(0, "20.0.0.1", "ok targets of stream-a 1 of 1 ready", "ok gate", "gateway-a4 is up since",
		"and receives the VIP")
	want(0, "2000::1", "gateway-a6 is up since")
	want(1, vipB4, "NO targets of stream-b 0 of 1 ready, needs 1; target-2 at", "connection refused", "next: ",
		"NO gate withdrawn")
	want(1, "20.0.0.99", "NO trench file of lb", "next: add it to attractor.vips")
	want(2, "20.0.0.1/24", "host bits")

	f.operate(0, "draining until", "drain", "--force", vipA4)
	want(1, vipA4, "NO gate", "An operator asked", "next: ", "frontend undrain")
	f.operate(0, "", "undrain", vipA4)
	want(0, vipA4, "and receives the VIP")

	f.must(f.gateway.Process.Kill())
	want(1, vipA4, "NO gateway", "gateway-a4 is down since", "birdc show protocols all gateway-a4")
	f.must(f.gateway.Start())
	want(0, vipA4, "and receives the VIP")

	f.must(f.pod.LB.Kill())
	want(1, vipA4, "NO lease", "next: does the lb container run", "lb was not asked",
		"`lb explain "+vipA4+"` in its container")
}
