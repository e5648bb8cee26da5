package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Issue 10: "a deleted readiness or admin socket file goes unnoticed until SVIDs rotate, then everything is withdrawn and stays so".
func TestRemovedSocketIsBoundAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	mark, from, fromFrontend := w.mark(), length(w.pod.LB), length(w.pod.Frontend)
	sockets := []string{w.pod.Socket(), w.pod.LBAdmin(), w.pod.FrontendAdmin()}
	before := w.operator()
	if _, err := w.ask(before); err != nil {
		t.Fatal(err)
	}
	for _, path := range sockets {
		w.must(os.Remove(path))
	}
	w.waitGet(w.operator())
	w.wantStatus("4 VIPs")
	w.waitFor(func() error {
		_, err := w.pod.Run(t.Context(), "frontend", "events", "--admin-socket=unix://"+w.pod.FrontendAdmin())
		return err
	})
	for _, path := range sockets {
		if got := modeOf(t, path); got != 0o600 {
			t.Errorf("%s has mode %#o, want 0600", path, got)
		}
	}
	w.waitLine(w.pod.LB, from, "condition changed", "service=ReadinessSocket", "serving=false", w.pod.Socket())
	w.waitLine(w.pod.LB, from, "condition changed", "service=ReadinessSocket", "serving=true")
	w.waitLine(w.pod.LB, from, "condition changed", "service=AdminSocket", "serving=true")
	w.waitLine(w.pod.Frontend, fromFrontend, "condition changed", "service=AdminSocket", "serving=true")
	// Connections and streams from before the removal continue.
	if _, err := w.ask(before); err != nil {
		t.Errorf("a connection from before the removal: %v", err)
	}
	if opened := lines(w.pod.LB, from, "readiness watch opened"); len(opened) > 0 {
		t.Errorf("the frontend opened another watch: %s", opened)
	}
	w.up(w.target2)
	w.wantRoutes(every()...)
	w.wantNothing(mark, vipA4, vipA6)
}

// The same for the whole directory, with SVIDs that rotate every few seconds, and with a path that
// cannot be bound for a while.
func TestRemovedSocketDirectoryIsCreatedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	dir := w.path("socket")
	socket := filepath.Join(dir, "lb.sock")
	rotating := "--dev-ttl=6s"
	w.must(w.pod.StartLB(rotating, "--socket=unix://"+socket))
	w.must(w.pod.StartFrontend(rotating, "--lb-socket=unix://"+socket))
	w.wantRoutes(vipA4, vipA6)
	mark, from := w.mark(), length(w.pod.LB)
	w.must(os.RemoveAll(dir))
	w.must(os.WriteFile(dir, nil, 0o600))
	w.waitLine(w.pod.LB, from, "condition", "service=ReadinessSocket", "is not a directory")
	w.waitLB("ReadinessSocket", false)
	w.must(os.Remove(dir))
	w.waitLB("ReadinessSocket", true)
	if got := modeOf(t, dir); got != 0o700 {
		t.Errorf("the directory has mode %#o, want 0700", got)
	}
	// The frontend moves to connections on the new socket, and no UPDATE leaves.
	w.waitLinesN(w.pod.LB, length(w.pod.LB), 3, "readiness watch opened")
	w.wantSilence(mark)

	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.LB, 0)
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
		t.Errorf("the end of lb left %v, error %v", left, err)
	}
}
