package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// Issue 10, item 5: one owner per network namespace and role. A second lb or frontend, and a cleanup with other flags,
// name the owner and change nothing; after a crash of the owner the namespace is free.
func TestNetNSHasOneOwner(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	before := w.kernel()
	w.start()
	w.until("confirmed   everything that is wanted", "status")
	running := w.kernel()

	other := func(name string) string { return filepath.Join(w.pod.Dir, "other", name) }
	second := []string{"--admin-socket=unix://" + other("admin.sock"), "--health-port=7791", "--metrics-port=7792"}
	refused := map[string][]string{
		"second lb":        w.pod.LBArgs(append(second, "--dataplane=nftables", "--socket=unix://"+other("lb.sock"), "--state-dir="+other("state"))...),
		"second frontend":  w.pod.FrontendArgs(append(second, "--bird-dir="+other("bird"), "--bird-socket="+other("bird.ctl"), "--lb-bgp-port=1791")...),
		"lb cleanup":       {filepath.Join(binaries, "lb"), "cleanup", "--first-table=7000"},
		"frontend cleanup": {filepath.Join(binaries, "frontend"), "cleanup"},
	}
	for name, args := range refused {
		role, owner, admin := "lb", w.pod.LB, w.pod.LBAdmin()
		if strings.Contains(name, "frontend") {
			role, owner, admin = "frontend", w.pod.Frontend, w.pod.FrontendAdmin()
		}
		p, err := w.Start(w.pod.Namespace(), strings.ReplaceAll(name, " ", "-"), args...)
		w.must(err)
		status, err := p.Wait(w.ctx)
		want := fmt.Sprintf("another %s (pid %d, user 0, admin socket unix://%s) owns this network namespace", role, owner.PID(), admin)
		if out := p.Output(); err != nil || status != 1 || !strings.Contains(out, want) {
			t.Errorf("%s: status %d, %v; want 1 and %q\n%s", name, status, err, want, p.Tail(5))
		}
	}
	if got := w.kernel(); got != running {
		t.Errorf("before\n%s\nafter\n%s", running, got)
	}
	if entries, err := os.ReadDir(other("")); !os.IsNotExist(err) {
		t.Errorf("a refused process left %v (%v)", entries, err)
	}
	w.must(w.WantVia(w.ctx, 1))

	for _, p := range []*lab.Process{w.pod.LB, w.pod.Frontend} {
		w.must(p.Kill())
	}
	for _, program := range []string{"lb", "frontend"} {
		out, status := (&world{t: t, Lab: w.Lab}).run(program, "cleanup")
		if status != 0 {
			t.Errorf("%s cleanup after a crash: status %d\n%s", program, status, out)
		}
	}
	if after := w.kernel(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}
