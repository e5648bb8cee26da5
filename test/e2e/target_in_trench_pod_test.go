package e2e

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// targetKernel returns the kernel state of the program target in the pod.
func (f *dataPlaneFixture) targetKernel() string {
	f.t.Helper()
	return f.shell("ip rule | grep 'proto 180' || true; ip route show table all proto 180; " +
		"ip -6 route show table all proto 180; nft list tables | grep vipgate-target || true")
}

// `target run` refuses the network namespace of a trench pod, and installs nothing without its
// interface. If its routes are in a trench pod nevertheless, lb reports them and the remedy.
func TestTargetInTrenchPod(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start()
	start := func(name, link string, more ...string) *lab.Process {
		t.Helper()
		p, err := f.Start(f.pod.Namespace(), name, append([]string{
			filepath.Join(binaries, "target"), "run", "--pool=20.0.0.0/24,2000::/64", "--interface=" + link,
			"--admin-socket=unix://" + filepath.Join(f.pod.Dir, "target.sock"), "--health-address=127.0.0.1:7793",
			"--metrics-address=127.0.0.1:7794",
		}, more...)...)
		f.must(err)
		return p
	}
	refused := func(role string, owner *lab.Process, more ...string) {
		t.Helper()
		p := start("refused-"+role, "int0", more...)
		status, err := p.Wait(f.ctx)
		want := fmt.Sprintf("%s (pid %d, user 0, ", role, owner.PID())
		if out := p.Output(); err != nil || status != 1 || !strings.Contains(out, want) ||
			!strings.Contains(out, "run target in the pods of applications") {
			t.Errorf("beside %s: status %d, %v; want 1 and %q\n%s", role, status, err, want, p.Tail(5))
		}
		if got := f.targetKernel(); got != "" {
			t.Errorf("beside %s: installed %s", role, got)
		}
	}
	refused("lb", f.pod.LB)
	f.must(f.pod.LB.Kill())
	refused("frontend", f.pod.Frontend)
	refused("frontend", f.pod.Frontend, "--once")

	// The reverse order.
	f.must(f.pod.Frontend.Kill())
	p := start("target-first", "none0")
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		out, _ := f.pod.Namespace().Run(f.ctx, filepath.Join(binaries, "target"), "status",
			"--admin-socket=unix://"+filepath.Join(f.pod.Dir, "target.sock"))
		if !strings.Contains(out, "interface none0: it does not exist") {
			return fmt.Errorf("status %s", out)
		}
		return nil
	}))
	if got := f.targetKernel(); got != "" {
		t.Errorf("without its interface target installed %s", got)
	}
	f.start()
	for _, q := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
		if out := q.Output(); !strings.Contains(out, "target runs in the network namespace") ||
			!strings.Contains(out, fmt.Sprintf("pid %d", p.PID())) {
			t.Errorf("%s does not name target: %s", q.Name, q.Tail(20))
		}
	}
	f.shell("ip link add none0 type veth peer none1; ip link set none0 up; ip link set none1 up")
	for _, text := range []string{
		`VIP 20.0.0.1/32: "target run" of this network namespace takes the packets to 20.0.0.0/24 (local route)`,
		`VIP 2000::1/128: "target run" of this network namespace takes the packets to 2000::/64 (local route)`,
		"remedy: end it here and run target cleanup",
		"0 of 2 VIPs ready",
	} {
		f.waitOutput(text, "status")
	}
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		out, err := f.lb("status")
		for _, a := range lab.TargetAddrs(1) {
			check := regexp.MustCompile(fmt.Sprintf(` target-1 +%s .*"target run" of this network namespace`, a))
			if err == nil && !check.MatchString(out) {
				err = fmt.Errorf("no reason at the target %s in %s", a, out)
			}
		}
		return err
	}))
	f.must(p.Kill())
	f.shell("'" + filepath.Join(binaries, "target") + "' cleanup")
	f.waitOutput("2 of 2 VIPs ready", "status")
	f.must(f.WantVia(f.ctx, 1))

	// Routes of other programs.
	f.shell("ip route add local 20.0.0.0/24 dev lo")
	f.waitOutput("20.0.0.0/24 is a local route of this network namespace", "status")
	f.waitOutput("ip route del local 20.0.0.0/24 table local", "status")
	f.waitOutput("1 of 2 VIPs ready", "status")
	f.shell("ip route del local 20.0.0.0/24 dev lo table local")
	f.waitOutput("2 of 2 VIPs ready", "status")
}
