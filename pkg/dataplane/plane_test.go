package dataplane

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// The plane assigns timeouts to checks, and lets the kernel remove expired flows.
func TestFlowsOfChecksAreShort(t *testing.T) {
	s := newSite(t)
	p := s.start()
	s.eventually("eviction", func() bool {
		at, err := ask(t.Context(), p.Plane, "read", func(*engine) (time.Time, error) { return p.nextEviction, nil })
		s.must(err)
		return !at.IsZero()
	})
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving)))
	if err := openConn(t, s.ns, fwstate.Config{}).UseTimeouts(); err != nil {
		lab.Skip(t, "a kernel that assigns timeouts (CONFIG_NF_CONNTRACK_TIMEOUT)")
	}
	s.eventually("timeouts", func() bool { return strings.Contains(s.snapshot(), `ct timeout set "checks-tcp"`) })
}

func TestTargetLifecycle(t *testing.T) {
	x := newSite(t)
	p := x.start()
	s := p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Serving, plan.Serving)))
	for _, f := range vip.Families {
		if !serves(s, "a", f, "t1", "t2") {
			t.Fatal(describeState(s))
		}
	}
	if s.VIPs[vip.Require("20.0.0.1/32")] != "a" || s.VIPs[vip.Require("2000::1/128")] != "a" ||
		len(s.Problems)+len(s.Drift) > 0 {
		t.Fatal(describeState(s))
	}
	x.has(t, "chain stream/a", "default via 10.1.0.11 dev eth1 table 5000", "blackhole default table 5001",
		"fwmark 0x1389", "via fd01::b dev eth1 table 5000")
	handles := x.handles(x.number("a", "t1"))

	t.Log("draining")
	s = p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Draining, plan.Draining)))
	if !serves(s, "a", vip.IPv4, "t1") {
		t.Fatal(describeState(s))
	}
	x.has(t, `0x00001389 : goto target/5001`)

	t.Log("down")
	s = p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Down, plan.Down)))
	x.has(t, "chain target/5001", "lookup 5001")
	x.lacks(t, `goto target/5001`)

	t.Log("gone, and another one")
	s = p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), siteTarget(3, plan.Serving)))
	if !serves(s, "a", vip.IPv4, "t1", "t3") || !serves(s, "a", vip.IPv6, "t1") {
		t.Fatal(describeState(s))
	}
	x.lacks(t, "target/5001", "lookup 5001", "table 5001")

	t.Log("another address")
	moved := siteTarget(3, plan.Serving)
	moved.IPs[0] = netip.MustParseAddr("10.1.0.99")
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), moved))
	x.has(t, "default via 10.1.0.99 dev eth1 table "+x.number("a", "t3"))

	t.Log("size and seed")
	changed := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), moved)
	changed.Size, changed.Seed = 211, 7
	s = p.configure(changed)
	if !serves(s, "a", vip.IPv4, "t1", "t3") || len(s.Problems)+len(s.Drift) > 0 {
		t.Fatal(describeState(s))
	}
	x.has(t, "mod 211 seed 0x7")

	t.Log("the VIP moves to another stream")
	other := siteStream("b", bothVIPs, siteTarget(4, plan.Serving, plan.Serving))
	s = p.configure(siteStream("a", []string{"20.0.0.7/32", "20.1.0.0/24"}, siteTarget(1, plan.Serving, plan.Serving),
		moved), other)
	if s.VIPs[vip.Require("20.0.0.1/32")] != "b" || s.VIPs[vip.Require("20.1.0.0/24")] != "a" {
		t.Fatal(describeState(s))
	}
	if x.handles("5000") != handles {
		t.Errorf("the chain of t1, which stayed, was rebuilt:\n%s\n%s", handles, x.handles("5000"))
	}

	t.Log("a stream goes")
	s = p.configure(other)
	x.lacks(t, "stream/a", "table 5000 ")
	if s.Streams["a"] != nil {
		t.Fatal(describeState(s))
	}
}

func TestDriftIsRepairedWithinASecond(t *testing.T) {
	x := newSite(t)
	events := make(chan Repaired, 1000)
	p := x.start(func(o *Options) {
		o.OnRepair = func(list []Repaired) {
			for _, r := range list {
				events <- r
			}
		}
	})
	before := p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Serving, plan.Serving)))
	whole := sortedLines(x.snapshot())
	for _, tt := range tamperings {
		t.Run(tt.name, func(t *testing.T) {
			x.sh(tt.command)
			for {
				select {
				case r := <-events:
					if r.Object == tt.object {
						x.eventually("the kernel to be as before", func() bool { return sortedLines(x.snapshot()) == whole })
						p.wait("the state to be as before", func(s plan.State) bool {
							return len(s.Drift) == 0 && serves(s, "a", vip.IPv4, "t1", "t2") && maps.Equal(s.VIPs, before.VIPs) &&
								s.Streams["a"].Problem[vip.IPv4] == ""
						})
						return
					}
				case <-time.After(patience):
					t.Fatalf("%s is not repaired: %s", tt.object, x.snapshot())
				}
			}
		})
	}
}

// Packets are also forwarded without the goto over the rules of targets, so no VIP is
// withdrawn.
func TestHarmlessDriftIsNoProblem(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	if _, err := p.Hold(t.Context(), "", 0); err != nil {
		t.Fatal(err)
	}
	x.sh("ip rule del prio 92; ip -6 rule del prio 90")
	s := p.wait("drift", func(s plan.State) bool { return len(s.Drift) == 1 })
	if s.Streams["a"].Problem != [2]string{} || len(s.VIPs) != 2 || !serves(s, "a", vip.IPv6, "t1") {
		t.Error(describeState(s))
	}
}

func TestHeldDriftIsShown(t *testing.T) {
	for _, tt := range tamperings {
		t.Run(tt.name, func(t *testing.T) {
			x := newSite(t)
			snapshot := func() string { return sortedLines(movedTables.ReplaceAllString(x.snapshot(), "")) }
			p := x.start()
			stream := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
				siteTarget(2, plan.Serving, plan.Serving))
			p.configure(stream)
			whole := snapshot()
			if _, err := p.Hold(t.Context(), "", 0); err != nil {
				t.Fatal(err)
			}
			x.sh(tt.command)
			drifted := func(s plan.State) bool {
				return slices.ContainsFunc(s.Drift, func(d plan.Drift) bool { return d.Object == tt.object }) &&
					(tt.serves == nil || serves(s, "a", vip.IPv4, tt.serves...))
			}
			s := p.wait("drift of "+tt.object, drifted)
			for _, d := range s.Drift {
				if d.Since.IsZero() {
					t.Errorf("no time in %+v", d)
				}
			}
			if tt.name == "VIP" && s.VIPs[vip.Require("20.0.0.1/32")] != "" {
				t.Error("the VIP is said to be served")
			}
			if (tt.name == "entry" || tt.name == "stream's rules" || tt.name == "table" || tt.name == "ruleset") &&
				s.Streams["a"].Problem[vip.IPv4] == "" {
				t.Error("the stream has no problem: " + describeState(s))
			}
			// A restart with the same configuration changes nothing.
			p.stop()
			p = x.start()
			p.configure(stream)
			p.wait("the drift after a restart", drifted)
			x.lacks(t, tt.gone)
			if done, err := p.Reconcile(t.Context()); err != nil || len(done) > 0 {
				t.Errorf("reconcile repaired %+v, %v", done, err)
			}
			done, err := p.Resume(t.Context(), "")
			if err != nil || len(done) == 0 {
				t.Fatalf("resume repaired %+v, %v", done, err)
			}
			s = p.wait("no drift", func(s plan.State) bool { return len(s.Drift) == 0 && serves(s, "a", vip.IPv4, "t1", "t2") })
			if s.Streams["a"].Problem[vip.IPv4] != "" || s.VIPs[vip.Require("20.0.0.1/32")] != "a" || len(s.Held) > 0 {
				t.Error(describeState(s))
			}
			if got := snapshot(); got != whole {
				t.Errorf("before\n%s\nafter\n%s", whole, x.snapshot())
			}
		})
	}
}

// One stream is held, the second one is repaired.
func TestHoldOfOneStream(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)),
		siteStream("b", []string{"20.0.0.2/32"}, siteTarget(2, plan.Serving)))
	if _, err := p.Hold(t.Context(), "a", 0); err != nil {
		t.Fatal(err)
	}
	x.sh("nft flush ruleset")
	p.wait("b to be repaired", func(s plan.State) bool {
		return s.VIPs[vip.Require("20.0.0.2/32")] == "b" && serves(s, "b", vip.IPv4, "t2") &&
			s.VIPs[vip.Require("20.0.0.1/32")] == "" && len(s.Drift) > 0
	})
	x.lacks(t, "stream/a")
	if _, err := p.Resume(t.Context(), "b"); err == nil {
		t.Error("a stream that is not held was resumed")
	}
	if _, err := p.Resume(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	p.wait("a to be repaired",
		func(s plan.State) bool { return s.VIPs[vip.Require("20.0.0.1/32")] == "a" && len(s.Drift) == 0 })
}

// A disk that hangs during a hold does not stop the data plane, and one that fails changes nothing.
func TestHoldDoesNotWaitForDisk(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	writing, disk := make(chan struct{}), make(chan error)
	_, err := ask(t.Context(), p.Plane, "replace", func(e *engine) (struct{}, error) {
		e.holds.write = func(string, any) error {
			writing <- struct{}{}
			return <-disk
		}
		return struct{}{}, nil
	})
	x.must(err)
	for _, failure := range []error{unix.EIO, nil} {
		done := make(chan error, 1)
		go func() {
			_, err := p.Hold(t.Context(), "a", 0)
			done <- err
		}()
		<-writing
		p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)),
			siteStream("b", []string{"20.0.0.2/32"}, siteTarget(2, plan.Serving)))
		if held := len(p.State().Load().Held) > 0; held {
			t.Error("held before the file is written")
		}
		disk <- failure
		if err := <-done; !errors.Is(err, failure) {
			t.Errorf("got %v, want %v", err, failure)
		}
		_, held := p.wait("the hold", func(s plan.State) bool {
			return failure != nil || len(s.Held) > 0
		}).Held["a"]
		if held != (failure == nil) {
			t.Errorf("%v: held %t", failure, held)
		}
	}
}

func TestHoldExpires(t *testing.T) {
	x := newSite(t)
	p := x.start()
	stream := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving))
	p.configure(stream)
	until, err := p.Hold(t.Context(), "a", time.Second)
	x.must(err)
	x.sh("ip rule del fwmark 5000/0xffffff lookup 5000")
	p.wait("drift", func(s plan.State) bool { return len(s.Drift) > 0 && s.Held["a"].Equal(until) })
	p.stop()
	p = x.start()
	p.configure(stream)
	p.wait("the end of the hold, and the repair",
		func(s plan.State) bool {
			return len(s.Held) == 0 && len(s.Drift) == 0 && serves(s, "a", vip.IPv4, "t1")
		})
	if time.Now().Before(until) {
		t.Error("the hold ended early")
	}
}

// Repairs back off if a process deletes a rule repeatedly, and the conflict is reported once.
func TestRepairsBackOff(t *testing.T) {
	w := newModelFixture()
	desired := desiredOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("x1", plan.Serving)),
		testStream("b", []string{"20.0.0.2/32"}, testTarget("x2", plan.Serving)))
	w.settle(desired, false)
	var reports, contested int
	w.e.repairs.report = func(list []Repaired) {
		for _, r := range list {
			reports++
			if r.Contested {
				contested++
			}
		}
	}
	slot := w.slot("a", "x1")
	var waited []time.Duration
	for range 12 {
		slot.Rules[vip.IPv4] = false
		w.notice()
		w.settle(desired, false)
		began := w.clock
		if !slot.Rules[vip.IPv4] {
			at := w.e.deadlines()
			if len(at) != 1 || w.state().Drift == nil {
				t.Fatal("no repair is to come")
			}
			w.clock = at[0]
			w.settle(desired, false)
		}
		if !slot.Rules[vip.IPv4] {
			t.Fatal("not repaired when its pause was over")
		}
		waited = append(waited, w.clock.Sub(began))
	}
	if waited[0] != 0 || waited[1] != failurePause || waited[2] != 2*failurePause || waited[11] != maxPause {
		t.Errorf("pauses %v", waited)
	}
	if reports != contestedAfter || contested != 1 || w.e.repairs.total != 12 {
		t.Errorf("%d reports, %d of them contested, %d repairs", reports, contested, w.e.repairs.total)
	}
	// An object of a different stream is repaired without a delay.
	w.slot("b", "x2").Rules[vip.IPv4] = false
	w.notice()
	w.settle(desired, false)
	if !w.slot("b", "x2").Rules[vip.IPv4] {
		t.Error("another stream waits")
	}
	w.clock = w.clock.Add(2 * repairMemory)
	w.notice()
	w.settle(desired, false)
	slot.Rules[vip.IPv4] = false
	w.notice()
	w.settle(desired, false)
	if !slot.Rules[vip.IPv4] {
		t.Error("the back-off did not end")
	}
}

func TestRoutesComeBackWithTheLink(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	// An interface that goes down loses its IPv6 addresses as well, unless configured to
	// keep them.
	x.must(x.ns.Sysctl("net.ipv6.conf.eth1.keep_addr_on_down", "1"))
	whole := sortedLines(x.snapshot())
	x.sh("ip link set eth1 down")
	s := p.wait("no target to serve", func(s plan.State) bool {
		return serves(s, "a", vip.IPv4) && serves(s, "a", vip.IPv6)
	})
	if why := s.Unreachable[netip.MustParseAddr("10.1.0.11")]; why != "link eth1 is down" || len(s.Drift) > 0 {
		t.Error(describeState(s))
	}
	x.sh("ip link set eth1 up")
	p.wait("the target to serve again", func(s plan.State) bool {
		return serves(s, "a", vip.IPv4, "t1") && serves(s, "a", vip.IPv6, "t1") && len(s.Drift) == 0 &&
			len(s.Unreachable) == 0
	})
	if got := sortedLines(x.snapshot()); got != whole {
		t.Errorf("before\n%s\nafter\n%s", whole, got)
	}
	for range 5 {
		x.sh("ip link set eth1 down; ip link set eth1 up")
	}
	p.wait("the target to serve again", func(s plan.State) bool {
		return serves(s, "a", vip.IPv4, "t1") && serves(s, "a", vip.IPv6, "t1") && len(s.Drift) == 0
	})
	x.eventually("the kernel to be as before", func() bool { return sortedLines(x.snapshot()) == whole })
}

func TestFailedNeighborIsOut(t *testing.T) {
	x := newSite(t)
	p := x.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving),
		siteTarget(2, plan.Serving, plan.Serving)))
	x.sh("ip neigh replace 10.1.0.12 dev eth1 lladdr 02:00:00:00:00:12 nud reachable; ip neigh replace 10.1.0.12 dev " +
		"eth1 nud failed")
	s := p.wait("t2 out of the table", func(s plan.State) bool { return serves(s, "a", vip.IPv4, "t1") })
	if !serves(s, "a", vip.IPv6, "t1", "t2") ||
		!strings.Contains(s.Unreachable[netip.MustParseAddr("10.1.0.12")], "NUD_FAILED") {
		t.Error(describeState(s))
	}
	x.sh("ip neigh replace 10.1.0.12 dev eth1 lladdr 02:00:00:00:00:12 nud reachable")
	p.wait("t2 in the table",
		func(s plan.State) bool { return serves(s, "a", vip.IPv4, "t1", "t2") && len(s.Unreachable) == 0 })
}

func TestDrainEnds(t *testing.T) {
	x := newSite(t)
	p := x.start()
	a := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving, plan.Serving))
	p.configure(a)
	p.stop()
	p = x.start()
	left := siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving))
	left.DrainTime = 500 * time.Millisecond
	s := p.configure(left)
	if !serves(s, "a", vip.IPv4, "t1") {
		t.Fatal(describeState(s))
	}
	slots, err := p.Targets(t.Context())
	if err != nil || len(slots) != 2 || slots[1].State != "draining" || slots[1].DrainEnd.IsZero() ||
		slots[0].Entries[vip.IPv4] != 103 {
		t.Fatalf("%+v, %v", slots, err)
	}
	x.eventually("t2 gone", func() bool {
		slots, err := p.Targets(t.Context())
		return err == nil && len(slots) == 1
	})
	x.lacks(t, "target/5001", "table 5001", "lookup 5001")
}

func TestProblemsWithTheKernel(t *testing.T) {
	x := newSite(t)
	x.sh("ip route add default via 10.1.0.77 table 5000; ip rule add fwmark 5001 lookup 77")
	x.sh("ip address add 20.0.0.9/32 dev lo")
	p := x.start()
	far := plan.Target{
		Name: "far", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Roles: [2]plan.Role{plan.Serving, plan.Down},
	}
	p.Configure(desiredOf(
		siteStream("a", append(bothVIPs, "20.0.0.9/32"), siteTarget(1, plan.Serving, plan.Serving), far),
		siteStream("b", []string{"20.0.0.1/32", "20.0.0.2/32"}, siteTarget(2, plan.Serving, plan.Serving)),
	))
	s := p.wait("problems", func(s plan.State) bool { return len(s.Problems) >= 5 && serves(s, "a", vip.IPv4, "t1") })
	for _, object := range []string{"fwmark 5000", "fwmark 5001", "target a/far", "VIP 20.0.0.9/32", "VIP 20.0.0.1/32"} {
		if !slices.ContainsFunc(s.Problems,
			func(p Problem) bool { return p.Object == object && p.Detail != "" && p.Remedy != "" }) {
			t.Errorf("no problem of %s in %+v", object, s.Problems)
		}
	}
	if s.VIPs[vip.Require("20.0.0.2/32")] != "b" || s.VIPs[vip.Require("20.0.0.1/32")] != "a" {
		t.Error(describeState(s))
	}
	x.has(t, "fwmark 0x1389 lookup 77")
	if got := x.sh("ip route show table 5000"); !strings.Contains(got, "10.1.0.77") {
		t.Errorf("a foreign route: %s", got)
	}
	x.sh("ip address add 192.0.2.2/24 dev eth1")
	p.wait("the target far away to serve", func(s plan.State) bool { return serves(s, "a", vip.IPv4, "far", "t1") })
}
