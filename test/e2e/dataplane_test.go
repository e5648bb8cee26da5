package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/status"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

// dataPlaneFixture is a pod whose lb forwards, with a gateway and two targets.
type dataPlaneFixture struct {
	t *testing.T
	*lab.Topology
	ctx     context.Context
	pod     *lab.Pod
	gateway *lab.Gateway
}

func dataPlaneTrench(targets ...int) string {
	text := fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [20.0.0.1/32, "2000::1/128"]
  gateways:
    %s
    %s
streams:
  - name: stream-a
    vips: [20.0.0.1/32, "2000::1/128"]
    check: {tcp: {port: %d}, %s}
    drainTime: 4s
    targets:
`, lineA4, lineA6, lab.HealthPort, lab.CheckTimers)
	for _, n := range targets {
		a := lab.TargetAddrs(n)
		text += fmt.Sprintf("      - {name: target-%d, ips: [%s, \"%s\"]}\n", n, a[0], a[1])
	}
	return text
}

// viaAddress makes the targets of a trench file be checked at their own addresses.
func viaAddress(trench string) string {
	return strings.ReplaceAll(trench, "interval:", "via: address, interval:")
}

func (f *dataPlaneFixture) checkOwnAddresses() {
	f.t.Helper()
	f.must(f.WriteTrench(viaAddress(dataPlaneTrench(1, 2))))
}

func newDataPlaneFixture(t *testing.T) *dataPlaneFixture { return newDataPlaneFixtureOf(t, 1, 2) }

// newDataPlaneFixtureOf creates the given numbers of pods and targets; the trench file lists two
// targets.
func newDataPlaneFixtureOf(t *testing.T, pods, targets int) *dataPlaneFixture {
	t.Helper()
	vips := []netip.Addr{netip.MustParseAddr("20.0.0.1"), netip.MustParseAddr("2000::1")}
	return newDataPlaneFixtureWith(t, lab.TopologyConfig{Pods: pods, Targets: targets, VIPs: vips})
}

func newDataPlaneFixtureWith(t *testing.T, config lab.TopologyConfig) *dataPlaneFixture {
	t.Helper()
	if lack := lab.MissingForTopology(); lack != "" {
		lab.Skip(t, lack)
	}
	config.Binaries, config.Options = binaries, []lab.Option{lab.QuickDAD}
	topology, err := lab.NewTopology(config)
	harness.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	f := &dataPlaneFixture{t: t, Topology: topology, ctx: ctx, pod: topology.Pods[0]}
	t.Cleanup(func() {
		defer cancel()
		if t.Failed() {
			for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
				if p != nil {
					t.Logf("== last lines of %s\n%s", p.Name, p.Tail(60))
				}
			}
		}
		harness.Check(t, topology.Close())
	})
	for _, a := range topology.Targets {
		f.must(a.Start())
	}
	f.must(topology.WriteTrench(dataPlaneTrench(1, 2)))
	f.gateway, err = topology.StartGateway(topology.GatewayConfig())
	f.must(err)
	return f
}

func (f *dataPlaneFixture) must(err error) {
	f.t.Helper()
	harness.Must(f.t, err)
}

func (f *dataPlaneFixture) start(extra ...string) {
	f.t.Helper()
	f.must(f.pod.StartLB(append([]string{"--dataplane=nftables"}, extra...)...))
	f.must(f.pod.StartFrontend("--ecmp"))
	f.must(f.WantVia(f.ctx, 1))
}

// lb runs a command of lb on the admin socket.
func (f *dataPlaneFixture) lb(args ...string) (string, error) {
	if len(args) == 1 && args[0] == "status" { // as the program prints it, without a process for each poll
		current, err := admin.LBStatus(f.ctx, f.pod)
		if err != nil {
			return "", err
		}
		return status.View{}.LB(current, time.Now()), nil
	}
	return f.pod.Run(f.ctx, "lb", append(args, "--admin-socket=unix://"+f.pod.LBAdmin())...)
}

// waitOutput waits until the output of a command of lb contains text, and returns the output.
func (f *dataPlaneFixture) waitOutput(text string, args ...string) string {
	f.t.Helper()
	var last string
	err := lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		out, err := f.lb(args...)
		if last = out; err == nil && !strings.Contains(out, text) {
			err = fmt.Errorf("lb %s does not say %q", strings.Join(args, " "), text)
		}
		return err
	})
	if err != nil {
		f.t.Fatalf("%v\n%s", err, last)
	}
	return last
}

// kernel returns all kernel state that may belong to the data plane.
func (f *dataPlaneFixture) kernel() string {
	f.t.Helper()
	var all string
	for _, command := range [][]string{
		{"nft", "list", "tables"},
		{"ip", "-4", "rule"},
		{"ip", "-6", "rule"},
		{"ip", "-4", "route", "show", "table", "all", "proto", "179"},
		{"ip", "-6", "route", "show", "table", "all", "proto", "179"},
	} {
		out, err := f.pod.Namespace().Run(f.ctx, command[0], command[1:]...)
		f.must(err)
		all += strings.Join(command, " ") + "\n" + out
	}
	return all
}

// TestDataPlaneForwardsAndCleansUp follows a data plane through start, crash, stop and cleanup.
func TestDataPlaneForwardsAndCleansUp(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	before := f.kernel()
	f.start(longGrace)
	g, err := f.Load(f.ctx, 100, 8, load.Config{})
	f.must(err)
	stopped := false
	defer func() {
		if !stopped {
			g.Stop(f.ctx)
		}
	}()
	f.must(g.WaitFlows(f.ctx))
	f.must(g.WaitTargets(f.ctx, "target-1", "target-2"))
	status := f.waitOutput("confirmed   desired state", "status")
	harness.WantText(t, status, "data plane  nftables", "stream-a  target-1  500", "serving")
	t.Logf("\n%s", status)
	if out, err := f.pod.Run(f.ctx, "lb", "cleanup"); err == nil || !strings.Contains(out, "another lb (pid ") {
		t.Errorf("cleanup beside a running lb: %v\n%s", err, out)
	}
	if out, err := f.lb("reconcile"); err != nil || !strings.Contains(out, "nothing to repair") {
		t.Errorf("reconcile: %v\n%s", err, out)
	}

	// After a crash the VIPs stay advertised and no packet is changed.
	f.must(f.pod.LB.Signal(syscall.SIGKILL))
	_, _ = f.pod.LB.Wait(f.ctx) // by a signal
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.waitOutput("confirmed   desired state", "status")

	r, err := g.Take(f.ctx)
	f.must(err)
	t.Logf("%d sent, %d failed", r.Sent, r.Failed)
	if r.Failed > 0 || r.Answered == 0 {
		t.Errorf("%d requests failed, %d were answered", r.Failed, r.Answered)
	}
	g.Stop(f.ctx)
	stopped = true

	// After the stop the kernel state remains until it is cleaned up.
	f.must(lab.Stop(f.ctx, f.pod.LB, f.pod.Frontend))
	if !strings.Contains(f.kernel(), "vipgate-lb") {
		t.Error("the end of the process removed the data plane")
	}
	out, err := f.pod.Run(f.ctx, "lb", "cleanup")
	f.must(err)
	t.Logf("\n%s", out)
	if !strings.Contains(out, "removed: ") {
		t.Errorf("cleanup says\n%s", out)
	}
	if _, err := f.pod.Run(f.ctx, "frontend", "cleanup"); err != nil {
		t.Error(err)
	}
	if after := f.kernel(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	if out, err = f.pod.Run(f.ctx, "lb", "cleanup"); err != nil || !strings.Contains(out, "nothing to remove") {
		t.Errorf("second cleanup: %v\n%s", err, out)
	}
}

// numberOf returns the fwmark of a target from the status.
func numberOf(t *testing.T, status, target string) string {
	t.Helper()
	_, table, found := strings.Cut(status, "MARK AND TABLE")
	if found {
		for line := range strings.Lines(table) {
			if words := strings.Fields(line); len(words) > 2 && words[1] == target {
				return words[2]
			}
		}
	}
	t.Fatalf("no number of %s in\n%s", target, status)
	return ""
}

// Cleanup needs only the marks in the kernel, also with other flags, and creates nothing.
func TestCleanupCreatesNoState(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	before := f.kernel()
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.waitOutput("confirmed   desired state", "status")
	f.must(f.pod.LB.Kill())
	if !strings.Contains(f.kernel(), "vipgate-lb") {
		t.Fatal("nothing is in the kernel")
	}
	f.must(os.RemoveAll(f.pod.StateDir()))
	out, err := f.pod.Run(f.ctx, "lb", "cleanup", "--first-table=9000", "--dataplane-priority=50", "--mark-mask=0xffff")
	if err != nil || !strings.Contains(out, "removed: ") {
		t.Errorf("cleanup: %v\n%s", err, out)
	}
	if _, err := os.Stat(f.pod.StateDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("cleanup created the state directory: %v", err)
	}
	if after := f.kernel(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}

// The gateway must never send to a VIP for which the kernel has no target: the last one leaves the
// kernel after the frontend's withdrawal.
func TestLastTargetRemovedAfterWithdrawal(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start("--drain-time=1h") // lb waits as long for the frontend
	serving := func() bool {
		f.t.Helper()
		out, err := f.pod.Namespace().Run(f.ctx, "nft", "list", "map", "inet", "vipgate-lb", "maglev4/stream-a")
		f.must(err)
		return strings.Contains(out, "elements")
	}
	if !serving() {
		t.Fatal("no target serves")
	}
	f.must(f.pod.Frontend.Signal(syscall.SIGSTOP))
	for _, a := range f.Targets {
		f.must(a.Unhealthy()) // the application continues to serve
	}
	f.waitOutput("stream stream-a (ipv4): until the frontend withdraws 1 VIP", "status")
	if !serving() {
		t.Error("the gateway sends to a VIP that has no target in the kernel")
	}
	f.must(f.pod.Frontend.Signal(syscall.SIGCONT))
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		if serving() {
			return errors.New("targets are in the kernel")
		}
		return nil
	}))
	if via, err := f.Via(f.VIPs[0]); err != nil || len(via) > 0 {
		t.Errorf("the last target left the kernel while the gateway sends to pods %v, %v", via, err)
	}
	f.waitOutput("not ready  too few targets ready", "status")

	// A recovered VIP is announced only after the kernel has its target.
	for _, a := range f.Targets {
		f.must(a.Start())
	}
	f.must(lab.Eventually(f.ctx, time.Millisecond, func() error {
		via, err := f.Via(f.VIPs[0])
		if err == nil && len(via) > 0 && !serving() {
			t.Fatal("the gateway sends to a VIP that has no target in the kernel")
		}
		if err == nil && len(via) == 0 {
			err = fmt.Errorf("the gateway has no route")
		}
		return err
	}))
}
