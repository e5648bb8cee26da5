package dataplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/crash"
)

// victimFile is the environment variable with the file of the desired state. With it the test
// binary is the victim: a process that applies the state and then exits, or is killed at a step.
const victimFile = "VIPGATE_VICTIM"

// runVictim runs a data plane until the desired state is applied.
func runVictim(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var desired plan.Desired
	if err := json.Unmarshal(b, &desired); err != nil {
		return err
	}
	afterStep = crash.After
	p, err := New(Options{StateDir: filepath.Dir(file), Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	p.Configure(&desired)
	err = waitApplied(ctx, p, desired.Revision)
	cancel()
	return errors.Join(err, <-done)
}

// waitApplied waits until the revision is confirmed and no target is draining.
func waitApplied(ctx context.Context, p *Plane, revision uint64) error {
	for {
		s, changed := p.State().Get()
		if s.Revision == revision && s.Err == nil && len(s.Problems) == 0 {
			targets, err := p.Targets(ctx)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(targets, func(t TargetView) bool {
				return !t.DrainEnd.IsZero() || t.State == "pending" || t.State == "removing"
			}) {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last state: %+v", ctx.Err(), s)
		case <-changed:
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// victim runs a victim in the site until the desired state is applied or a step kills it.
func (s *site) victim(w *plan.Desired, step string) (killed bool) {
	s.t.Helper()
	b, err := json.Marshal(w)
	s.must(err)
	file := filepath.Join(s.dir, "desired")
	s.must(os.WriteFile(file, b, 0o600))
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), crash.Variable+"="+step, victimFile+"="+file)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	s.must(s.ns.Start(cmd))
	err = cmd.Wait()
	if exit, ok := err.(*exec.ExitError); ok && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL &&
		ctx.Err() == nil {
		return true
	}
	if err != nil {
		s.t.Fatalf("%v: %s", err, out.String())
	}
	return false
}

func TestKillAtAnyStepConverges(t *testing.T) {
	moved := siteTarget(3, plan.Serving, plan.Serving)
	moved.IPs[0] = netip.MustParseAddr("10.1.0.99")
	first := desiredOf(
		siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, plan.Serving, plan.Serving),
			siteTarget(2, plan.Serving, plan.Serving),
			siteTarget(3, plan.Serving, plan.Serving)),
		siteStream("b", []string{"20.0.0.2/32"}, siteTarget(4, plan.Serving)),
	)
	drains := siteStream("a", append(bothVIPs, "20.1.1.0/24"), siteTarget(1, plan.Serving, plan.Serving), moved,
		siteTarget(5, plan.Serving, plan.Serving))
	drains.DrainTime, drains.Match = 200*time.Millisecond, siteMatch[1:]
	second := desiredOf(drains, siteStream("c", []string{"20.0.0.2/32"}, siteTarget(6, plan.Serving),
		siteTarget(7, plan.Draining)))
	second.Streams["c"].Match = nil
	run := func(t *testing.T, steps ...string) (end string) {
		x := newSite(t)
		if x.victim(first, "") {
			t.Fatal("killed without a step")
		}
		handles := x.handles("5000")
		for _, step := range steps {
			if !x.victim(second, step) {
				t.Fatalf("not killed after %s", step)
			}
		}
		x.victim(second, "")
		if got := x.handles("5000"); got != handles {
			t.Errorf("the chain of t1, which stayed, was rebuilt:\n%s\n%s", handles, got)
		}
		return sortedLines(x.snapshot())
	}
	undisturbed := run(t)
	if !strings.Contains(undisturbed, "10.1.0.99") || strings.Contains(undisturbed, "table 5001") {
		t.Fatalf("the end state is wrong:\n%s", undisturbed)
	}
	for _, step := range crash.Steps {
		t.Run(step, func(t *testing.T) {
			if end := run(t, step); end != undisturbed {
				t.Errorf("undisturbed\n%s\nkilled\n%s", undisturbed, end)
			}
		})
	}
	// Kill again during the change back, and at the end of the drain.
	for _, steps := range [][]string{
		{crash.Written, crash.Routes}, {
			crash.Planned, crash.Routes,
			crash.Written,
		}, {crash.Written + ":2"}, {crash.Flushed + ":2"},
	} {
		t.Run(strings.Join(steps, " "), func(t *testing.T) {
			if end := run(t, steps...); end != undisturbed {
				t.Errorf("undisturbed\n%s\nkilled\n%s", undisturbed, end)
			}
		})
	}
}

// foreign creates objects of another process outside and inside the plane's table, and returns a
// function that lists them.
func (s *site) foreign() func() string {
	s.t.Helper()
	s.sh(`nft add chain inet vipgate-lb theirs
nft add rule inet vipgate-lb theirs counter
nft add element inet vipgate-lb vip4 { 30.0.0.1 : goto theirs }
nft add table ip other
nft add chain ip other stream/a
ip rule add prio 91 fwmark 7000 lookup 7000
ip route add default via 10.1.0.200 table 7000
ip route add 99.0.0.0/8 via 10.1.0.200 proto 179`)
	return func() string {
		return s.sh("nft -s list chain inet vipgate-lb theirs; nft list table ip other; nft list map inet vipgate-lb vip4 " +
			"| grep -o '30.0.0.1 : goto theirs'; ip rule | grep 'lookup 7000'; ip route show table 7000; " +
			"ip route show 99.0.0.0/8")
	}
}

// A modulus that another process wrote, which is not the size of a Maglev table, is replaced.
func TestRecoveredSize(t *testing.T) {
	targets := map[string]plan.InstalledTarget{}
	for i, name := range []string{"x1", "x2", "x3"} {
		targets[name] = plan.InstalledTarget{FWMark: 5000 + uint32(i), Label: plan.Label{Stream: "a", Name: name}}
	}
	for size, valid := range map[uint32]bool{
		0: false, 1: false, 2: true, 1000: false, 1009: true, 65537: true, 131071: true,
		plan.MaxTable - 3: true, plan.MaxTable + 7: false, math.MaxUint32 - 4: false,
	} {
		stream := &plan.KernelStream{Name: "a", Size: size, Seed: 7}
		stream.Tables[vip.IPv4] = []uint32{5000, 5001, 5002}
		got := recoverStream(stream, targets, nil)
		if (got.Size == size) != valid || !valid && got.Size != unknownSize {
			t.Errorf("%d: size %d", size, got.Size)
		}
		if got.Stage != plan.StagePending {
			t.Errorf("%d: stage %d", size, got.Stage)
		}
	}
}

// A stream may have any name: its targets are not those of fwmarks without a known target.
func TestRestartWithStreamOfDash(t *testing.T) {
	w := newModelFixture()
	dash := testStream("-", []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving))
	w.settle(desiredOf(dash), false)
	before := w.number("-", "x1")
	w.restart()
	w.settle(desiredOf(dash, testStream("a", []string{"20.0.0.2/32"}, testTarget("x1", plan.Serving))), false)
	if after := w.number("-", "x1"); after != before || after == 0 {
		t.Errorf("the target has fwmark %d, had %d", after, before)
	}
}

func TestRestartLeavesForeignEntries(t *testing.T) {
	x := newSite(t)
	p := x.start()
	streams := []*plan.Stream{
		siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, plan.Serving, plan.Serving),
			siteTarget(2, plan.Draining, plan.Serving)),
		siteStream("b", []string{"20.0.0.2/32"}, siteTarget(1, plan.Serving), siteTarget(3,
			plan.Serving)),
	}
	p.configure(streams...)
	foreign := x.foreign()
	theirs := foreign()
	before := p.configure(streams...)
	p.stop()
	// The handles of rules and chains show objects that were rebuilt.
	snapshot := func() string { return x.sh("nft -a -s list ruleset") + x.snapshot() }
	all := snapshot()
	p = x.start()
	s := p.wait("the first look", func(s plan.State) bool { return !s.At.IsZero() && s.Err == nil })
	<-p.Ready()
	if !maps.Equal(s.VIPs, before.VIPs) || !serves(s, "a", 1, "t1", "t2") || len(s.Drift) > 0 {
		t.Error(describeState(s))
	}
	s = p.configure(streams...)
	if got := snapshot(); got != all || len(s.Drift) > 0 {
		t.Errorf("drift %+v; before\n%s\nafter\n%s", s.Drift, all, got)
	}
	p.configure(streams[1])
	if got := foreign(); got != theirs {
		t.Errorf("foreign entries\n%s\nbecame\n%s", theirs, got)
	}
}

// Changes of a target preserve routes of another process in its table.
func TestForeignRoutesInTargetTableStay(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	x.sh("ip route add 99.0.0.0/8 via 10.1.0.200 table 5000; ip route add default via 10.1.0.201 metric 7 proto static " +
		"table 5000; ip -6 route add 2001:db8:99::/48 via fd01::99 table 5000")
	foreign := func() string {
		return x.sh("ip route show table 5000 | grep -v 'proto 179'; ip -6 route show table 5000 | grep -v 'proto 179'")
	}
	theirs := foreign()
	check := func(when string) {
		t.Helper()
		if got := foreign(); got != theirs {
			t.Fatalf("%s: foreign routes\n%s\nbecame\n%s", when, theirs, got)
		}
	}
	moved := siteTarget(1, plan.Serving, plan.Serving)
	moved.IPs[0] = netip.MustParseAddr("10.1.0.99")
	p.configure(siteStream("a", bothVIPs, moved))
	check("another address")
	x.sh("ip route flush table 5000 proto 179")
	x.eventually("the route to be repaired", func() bool { return strings.Contains(x.snapshot(), "via 10.1.0.99") })
	check("a repair")
	p.configure(siteStream("a", bothVIPs, siteTarget(2, plan.Serving, plan.Serving)))
	x.eventually("t1 to be gone", func() bool { return !strings.Contains(x.snapshot(), "via 10.1.0.99") })
	check("the removal")
	p.stop()
	x.must(x.ns.Do(func() error {
		_, err := Cleanup(context.Background(), x.options())
		return err
	}))
	check("cleanup")
}

func TestCleanupLeavesForeignEntries(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Draining, plan.Serving)), siteStream("b", []string{"20.0.0.2/32"}, siteTarget(1, plan.Serving)))
	foreign := x.foreign()
	theirs := foreign()
	p.stop()
	var lines []string
	x.must(x.ns.Do(func() (err error) {
		lines, err = Cleanup(context.Background(), x.options())
		return err
	}))
	for _, want := range []string{
		"rule fwmark 5000 lookup 5000 (IPv4)", "route default via 10.1.0.11 table 5000 (IPv4)",
		"chain stream/a", "element 20.0.0.2/32 of map vip4 (to stream b)", "map maglev6/a", "rules that no target owns",
		"table inet vipgate-lb with its base chains and common maps, unless another process has objects in it",
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in %q", want, lines)
		}
	}
	if got := foreign(); got != theirs {
		t.Errorf("foreign entries\n%s\nbecame\n%s", theirs, got)
	}
	x.lacks(t, "stream/b", "target/", "lookup 5000", "table 5001", "jhash", "maglev")
}

func TestCleanupLeavesNoOwnObjects(t *testing.T) {
	x := newSite(t)
	before := x.snapshot()
	p := x.start()
	p.configure(siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Draining, plan.Serving)))
	p.stop()
	x.must(x.ns.Do(func() error {
		_, err := Cleanup(context.Background(), x.options())
		return err
	}))
	if got := x.snapshot(); got != before {
		t.Errorf("left: %s", got)
	}
}
