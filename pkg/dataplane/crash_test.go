package dataplane

import (
	"context"
	"encoding/json"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// buildVictim builds the program that can be killed at each step.
func buildVictim(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "victim")
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	defer cancel()
	if out, err := command(ctx, "go", "build", "-tags", "vipgate_faults", "-o", path, "./testdata/victim"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}

// victim runs the program in the site until all is as wanted, or it is killed.
func (s *site) victim(path string, w *Desired, fault string) (killed bool) {
	s.t.Helper()
	b, err := json.Marshal(w)
	s.must(err)
	file := filepath.Join(s.t.TempDir(), "desired")
	s.must(os.WriteFile(file, b, 0o600))
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, s.dir, file)
	cmd.Env = append(os.Environ(), "VIPGATE_FAULT="+fault)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	s.must(s.ns.Start(cmd))
	err = cmd.Wait()
	if exit, ok := err.(*exec.ExitError); ok && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL && ctx.Err() == nil {
		return true
	}
	if err != nil {
		s.t.Fatalf("%v: %s", err, out.String())
	}
	return false
}

func TestAKillAtAnyStepEndsTheSame(t *testing.T) {
	path := buildVictim(t)
	moved := siteTarget(3, Serving, Serving)
	moved.IPs[0] = netip.MustParseAddr("10.1.0.99")
	first := wantedOf(
		siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, Serving, Serving), siteTarget(2, Serving, Serving), siteTarget(3, Serving, Serving)),
		siteStream("b", []string{"20.0.0.2/32"}, siteTarget(4, Serving)),
	)
	drains := siteStream("a", append(bothVIPs, "20.1.1.0/24"), siteTarget(1, Serving, Serving), moved, siteTarget(5, Serving, Serving))
	drains.DrainTime = 200 * time.Millisecond
	second := wantedOf(drains, siteStream("c", []string{"20.0.0.2/32"}, siteTarget(6, Serving), siteTarget(7, Draining)))
	run := func(t *testing.T, faults ...string) (end string) {
		x := newSite(t)
		if x.victim(path, first, "") {
			t.Fatal("killed without a fault")
		}
		handles := x.handles("5000")
		for _, f := range faults {
			if !x.victim(path, second, f) {
				t.Fatalf("not killed at %s", f)
			}
		}
		x.victim(path, second, "")
		if got := x.handles("5000"); got != handles {
			t.Errorf("the chain of t1, which stayed, was rebuilt:\n%s\n%s", handles, got)
		}
		return sortedLines(x.snapshot())
	}
	undisturbed := run(t)
	if !strings.Contains(undisturbed, "10.1.0.99") || strings.Contains(undisturbed, "table 5001") {
		t.Fatalf("the end state is wrong:\n%s", undisturbed)
	}
	for _, step := range FaultSteps() {
		t.Run(step, func(t *testing.T) {
			if end := run(t, step); end != undisturbed {
				t.Errorf("undisturbed\n%s\nkilled\n%s", undisturbed, end)
			}
		})
	}
	// Killed again on the way back, and when the drain ends.
	for _, faults := range [][]string{{stepWritten, stepRoutes}, {stepPlanned, stepRoutes, stepWritten}, {stepWritten + ":2"}, {stepFlushed + ":2"}} {
		t.Run(strings.Join(faults, " "), func(t *testing.T) {
			if end := run(t, faults...); end != undisturbed {
				t.Errorf("undisturbed\n%s\nkilled\n%s", undisturbed, end)
			}
		})
	}
}

// foreign creates objects of another process, beside and among those of the plane, and returns how
// they are listed.
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
		return s.sh("nft -s list chain inet vipgate-lb theirs; nft list table ip other; nft list map inet vipgate-lb vip4 | grep -o '30.0.0.1 : goto theirs'; ip rule | grep 'lookup 7000'; ip route show table 7000; ip route show 99.0.0.0/8")
	}
}

func TestRestartLeavesForeignEntries(t *testing.T) {
	x := newSite(t)
	p := x.start()
	streams := []*Stream{siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, Serving, Serving), siteTarget(2, Draining, Serving)), siteStream("b", []string{"20.0.0.2/32"}, siteTarget(1, Serving), siteTarget(3, Serving))}
	p.configure(streams...)
	foreign := x.foreign()
	theirs := foreign()
	before := p.configure(streams...)
	p.stop()
	all := x.snapshot()
	p = x.start()
	s := p.wait("the first look", func(s State) bool { return !s.At.IsZero() && s.Err == nil })
	if len(s.VIPs) != len(before.VIPs) || !serves(s, "a", 1, "t1", "t2") || len(s.Drift) > 0 {
		t.Error(describeState(s))
	}
	s = p.configure(streams...)
	if got := x.snapshot(); got != all || len(s.Drift) > 0 {
		t.Errorf("drift %+v; before\n%s\nafter\n%s", s.Drift, all, got)
	}
	p.configure(streams[1])
	if got := foreign(); got != theirs {
		t.Errorf("foreign entries\n%s\nbecame\n%s", theirs, got)
	}
}

// Routes of another process in a target's table stay, whatever happens to the target.
func TestForeignRoutesInTargetTableStay(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, Serving, Serving)))
	x.sh("ip route add 99.0.0.0/8 via 10.1.0.200 table 5000; ip route add default via 10.1.0.201 metric 7 proto static table 5000; ip -6 route add 2001:db8:99::/48 via fd01::99 table 5000")
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
	moved := siteTarget(1, Serving, Serving)
	moved.IPs[0] = netip.MustParseAddr("10.1.0.99")
	p.configure(siteStream("a", bothVIPs, moved))
	check("another address")
	x.sh("ip route flush table 5000 proto 179")
	x.eventually("the route to be repaired", func() bool { return strings.Contains(x.snapshot(), "via 10.1.0.99") })
	check("a repair")
	p.configure(siteStream("a", bothVIPs, siteTarget(2, Serving, Serving)))
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
	p.configure(siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, Serving, Serving), siteTarget(2, Draining, Serving)), siteStream("b", []string{"20.0.0.2/32"}, siteTarget(1, Serving)))
	foreign := x.foreign()
	theirs := foreign()
	p.stop()
	var lines []string
	x.must(x.ns.Do(func() (err error) {
		lines, err = Cleanup(context.Background(), x.options())
		return err
	}))
	for _, want := range []string{"rule fwmark 5000 lookup 5000 (IPv4)", "route default via 10.1.0.11 table 5000 (IPv4)", "chain stream/a", "element 20.0.0.2/32 of map vip4 (to stream b)", "map maglev6/a"} {
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
	p.configure(siteStream("a", append(bothVIPs, "20.1.0.0/24"), siteTarget(1, Serving, Serving), siteTarget(2, Draining, Serving)))
	p.stop()
	x.must(x.ns.Do(func() error {
		_, err := Cleanup(context.Background(), x.options())
		return err
	}))
	if got := x.snapshot(); got != before {
		t.Errorf("left: %s", got)
	}
}
