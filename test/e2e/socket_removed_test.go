package e2e

import (
	"os"
	"path/filepath"
	"testing"
)

// A deleted readiness or admin socket file is detected and bound again
// (docs/architecture.md#failure-table).
func TestRemovedSocketIsRebound(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	mark, from, fromFrontend := f.mark(), length(f.pod.LB), length(f.pod.Frontend)
	sockets := []string{f.pod.Socket(), f.pod.LBAdmin(), f.pod.FrontendAdmin()}
	before := f.operator()
	if _, err := f.ask(before); err != nil {
		t.Fatal(err)
	}
	for _, path := range sockets {
		f.must(os.Remove(path))
	}
	f.waitGet(f.operator())
	f.wantStatus("4 VIPs")
	f.waitFor(func() error {
		_, err := f.pod.Run(t.Context(), "frontend", "events", "--admin-socket=unix://"+f.pod.FrontendAdmin())
		return err
	})
	for _, path := range sockets {
		if got := modeOf(t, path); got != 0o600 {
			t.Errorf("%s has mode %#o, want 0600", path, got)
		}
	}
	f.waitLine(f.pod.LB, from, "condition changed", "service=ReadinessSocket", "serving=false", f.pod.Socket())
	f.waitLine(f.pod.LB, from, "condition changed", "service=ReadinessSocket", "serving=true")
	f.waitLine(f.pod.LB, from, "condition changed", "service=AdminSocket", "serving=true")
	f.waitLine(f.pod.Frontend, fromFrontend, "condition changed", "service=AdminSocket", "serving=true")
	// Connections and streams from before the removal continue.
	if _, err := f.ask(before); err != nil {
		t.Errorf("a connection from before the removal: %v", err)
	}
	if opened := lines(f.pod.LB, from, "readiness watch opened"); len(opened) > 0 {
		t.Errorf("the frontend opened another watch: %s", opened)
	}
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.wantNoUpdates(mark, vipA4, vipA6)
}

// The whole directory is removed, with SVIDs that rotate every few seconds, and with a path that
// cannot be bound for a while.
func TestRemovedSocketDirectory(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	dir := f.path("socket")
	socket := filepath.Join(dir, "lb.sock")
	rotating := "--dev-ttl=6s"
	f.must(f.pod.StartLB(rotating, "--socket=unix://"+socket))
	f.must(f.pod.StartFrontend(rotating, "--lb-socket=unix://"+socket))
	f.wantRoutes(vipA4, vipA6)
	mark, from := f.mark(), length(f.pod.LB)
	f.must(os.RemoveAll(dir))
	f.must(os.WriteFile(dir, nil, 0o600))
	f.waitLine(f.pod.LB, from, "condition", "service=ReadinessSocket", "not a directory")
	f.waitLB("ReadinessSocket", false)
	f.must(os.Remove(dir))
	f.waitLB("ReadinessSocket", true)
	if got := modeOf(t, dir); got != 0o700 {
		t.Errorf("the directory has mode %#o, want 0700", got)
	}
	// The frontend moves to connections on the new socket, and no UPDATE is sent.
	f.waitLinesN(f.pod.LB, length(f.pod.LB), 3, "readiness watch opened")
	f.wantSilence(mark)

	f.stop(f.pod.LB)
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
		t.Errorf("the end of lb left %v, error %v", left, err)
	}
}
