package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// Each network namespace has one owner per role
// (docs/adr/0016-one-owner-per-network-namespace.md). A second lb or frontend, and a cleanup with
// other flags, fail with the name of the owner and change nothing; after a crash of the owner the
// namespace is free.
func TestNetNSHasOneOwner(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	before := f.kernel()
	f.start()
	f.waitOutput("confirmed   desired state", "status")
	running := f.kernel()

	other := func(name string) string { return filepath.Join(f.pod.Dir, "other", name) }
	second := []string{
		"--admin-socket=unix://" + other("admin.sock"), "--health-address=127.0.0.1:7791",
		"--metrics-address=127.0.0.1:7792",
	}
	refused := map[string][]string{
		"second lb": f.pod.LBArgs(
			append(second, "--dataplane=nftables", "--socket=unix://"+other("lb.sock"),
				"--state-dir="+other("state"))...,
		),
		"second frontend": f.pod.FrontendArgs(
			append(second, "--bird-dir="+other("bird"), "--bird-socket="+other("bird.ctl"), "--lb-bgp-port=1791")...,
		),
		"lb cleanup":       {filepath.Join(binaries, "lb"), "cleanup", "--first-table=7000"},
		"frontend cleanup": {filepath.Join(binaries, "frontend"), "cleanup"},
	}
	for name, args := range refused {
		role, owner, admin := "lb", f.pod.LB, f.pod.LBAdmin()
		if strings.Contains(name, "frontend") {
			role, owner, admin = "frontend", f.pod.Frontend, f.pod.FrontendAdmin()
		}
		p, err := f.Start(f.pod.Namespace(), strings.ReplaceAll(name, " ", "-"), args...)
		f.must(err)
		status, err := p.Wait(f.ctx)
		want := fmt.Sprintf(
			"another %s (pid %d, user 0, admin socket unix://%s) owns this network namespace", role, owner.PID(), admin,
		)
		if out := p.Output(); err != nil || status != 1 || !strings.Contains(out, want) {
			t.Errorf("%s: status %d, %v; want 1 and %q\n%s", name, status, err, want, p.Tail(5))
		}
	}
	if got := f.kernel(); got != running {
		t.Errorf("before\n%s\nafter\n%s", running, got)
	}
	if entries, err := os.ReadDir(other("")); !os.IsNotExist(err) {
		t.Errorf("a refused process left %v (%v)", entries, err)
	}
	f.must(f.WantVia(f.ctx, 1))

	for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
		f.must(p.Kill())
	}
	for _, program := range []string{"lb", "frontend"} {
		out, status := (&fixture{t: t, Lab: f.Lab}).run(program, "cleanup")
		if status != 0 {
			t.Errorf("%s cleanup after a crash: status %d\n%s", program, status, out)
		}
	}
	if after := f.kernel(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}
