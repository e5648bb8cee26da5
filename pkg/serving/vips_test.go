package serving

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/vip"
)

// numberedVIPs returns n VIPs of each family in ascending order.
func numberedVIPs(n int) (list []vip.VIP) {
	for _, format := range []string{"20.0.%d.%d/32", "2000::%x:%x/128"} {
		for i := range n {
			list = append(list, vip.Require(fmt.Sprintf(format, i>>8, i&0xff)))
		}
	}
	return list
}

func TestDecisionsAreInOrder(t *testing.T) {
	all := numberedVIPs(150)
	shuffled := slices.Clone(all)
	rand.Shuffle(len(all), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	r := newRig(t, Options{}, map[string][]targetset.Member{"s": numbered(1), "t": numbered(1), "u": numbered(1)})
	want := func(what string, got, want []vip.VIP) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	changed := func(x Result) (list []vip.VIP) {
		for _, c := range x.Changed {
			list = append(list, c.VIP)
		}
		return list
	}
	both := func(stream string, s healthcheck.State) (changed []healthcheck.Health) {
		for _, ip := range r.members[stream][0].IPs {
			k := healthcheck.Key{Stream: stream, Name: "t0", Addr: ip}
			changed = append(changed, healthcheck.Health{Key: k, State: s})
		}
		return changed
	}
	c := trenchOf(streamOf("s", shuffled[:100]...), streamOf("t", shuffled[50:200]...), streamOf("u", shuffled[200:]...))
	c.Attractor.VIPs = shuffled
	want("configured", changed(r.configure(c)), all)
	up := slices.Concat(both("u", healthcheck.Ready), both("s", healthcheck.Ready), both("t", healthcheck.Ready))
	want("all ready", changed(r.evaluate(up...)), all)
	var addrs []netip.Addr
	for _, v := range all {
		addrs = append(addrs, v.Prefix().Addr())
	}
	for range 10 { // the order of a map is random
		if streams, vips := r.e.Ready(); !slices.Equal(streams, []string{"s", "t", "u"}) || !slices.Equal(vips, addrs) {
			t.Fatalf("ready are %v, %v", streams, vips)
		}
	}
	down := slices.SortedFunc(slices.Values(shuffled[50:200]), vip.Compare)
	want("one stream down", changed(r.evaluate(both("t", healthcheck.NotReady)...)), down)
	c.Attractor.VIPs = shuffled[200:]
	c.Streams = c.Streams[2:]
	result := r.configure(c)
	want("removed", result.Removed, slices.SortedFunc(slices.Values(shuffled[:200]), vip.Compare))
	want("kept", changed(result), nil)
}

func TestSettleContinuesAfterReload(t *testing.T) {
	r := newRig(t, Options{Settle: time.Second}, map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1"), member("b", "172.16.0.2")},
	})
	r.configure(trenchOf(streamOf("s", vipA)))
	r.health("s", "a", healthcheck.Ready)
	if result := r.configure(trenchOf(streamOf("s", vipA, vipB))); !result.Settling {
		t.Error("the wait for first verdicts ended with another file")
	}
	r.now = r.now.Add(time.Second)
	if result := r.evaluate(); result.Settling || r.e.of(vipA).State != vip.Ready {
		t.Errorf("settling %v, %v after the time to settle", result.Settling, r.e.of(vipA).State)
	}
}

// A VIP that is out of the trench file for a moment is not removed by the decision.
func TestTwoReloadsInOneDecision(t *testing.T) {
	r := newRig(t, Options{}, targets("s", member("a", "172.16.0.1")))
	r.configure(trenchOf(streamOf("s", vipA, vipB)))
	r.health("s", "a", healthcheck.Ready)
	r.e.Configure(r.now, trenchOf(streamOf("s", vipB)), r.of)
	result := r.configure(trenchOf(streamOf("s", vipA, vipB)))
	if len(result.Removed) > 0 || r.e.of(vipA).State != vip.Ready {
		t.Errorf("removed %v, %v", result.Removed, r.e.of(vipA).State)
	}
}

// A decision allocates nothing for each of its VIPs.
func TestAllocationsOfDecision(t *testing.T) {
	allocations := func(vips int) float64 {
		r := newRig(t, Options{}, map[string][]targetset.Member{"s": numbered(1)})
		r.configure(trenchOf(streamOf("s", numberedVIPs(vips)...)))
		states := []healthcheck.State{healthcheck.Ready, healthcheck.NotReady}
		var changed []healthcheck.Health
		for _, ip := range r.members["s"][0].IPs {
			changed = append(changed, healthcheck.Health{Key: healthcheck.Key{Stream: "s", Name: "t0", Addr: ip}})
		}
		return testing.AllocsPerRun(10, func() {
			for i := range changed {
				changed[i].State = states[0]
			}
			slices.Reverse(states)
			if n := len(r.e.Evaluate(r.now, healthcheck.Evaluation{Changed: changed}).Changed); n != 2*vips {
				t.Fatalf("%d VIPs changed, want %d", n, 2*vips)
			}
			r.e.Targets()
		})
	}
	// With the race detector, sync.Pool randomly drops a quarter of the buffers of package fmt.
	const spread = 20
	if few, many := allocations(10), allocations(1000); many > few+spread {
		t.Errorf("%v allocations for 2 000 VIPs, %v for 20", many, few)
	}
}

func TestDriftIsShownForItsVIP(t *testing.T) {
	p := startPlaneRig(t, trenchOf(streamOf("s", vipA, vipB)), targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	state := p.e.kernel.state
	state.VIPs = nil
	state.Drift = []plan.Drift{
		{Object: "element 5000 of map live4/s", Detail: "is missing"},
		{Object: "element 20.0.0.2/32 of map vip4", Detail: "is missing"},
	}
	p.confirmState(state)
	for v, want := range map[vip.VIP]string{
		vipA: "not confirmed by the kernel yet", vipB: "element 20.0.0.2/32 of map vip4: is missing",
	} {
		if got := p.e.of(v); got.Reason != reasonDataPlane || got.Detail != want {
			t.Errorf("%s: %v: %q, want %q", v, got.Reason, got.Detail, want)
		}
	}
}

// BenchmarkDataPlane measures what follows a decision when VIPs go to a stream without ready
// targets, and their stream keeps them until the frontend withdraws them; while it does; and what
// the kernel confirms.
func BenchmarkDataPlane(b *testing.B) {
	vips := slices.Clip(numberedVIPs(5000))
	p := startPlaneRig(b, trenchOf(streamOf("s", vips...), streamOf("u", vipB)), map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1", "fd00::1")}, "u": {member("b", "172.16.0.2", "fd00::2")},
	})
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.reports(vips...)
	state := p.e.kernel.state
	here, moved := trenchOf(streamOf("s", vips...)), trenchOf(streamOf("s", vipB), streamOf("u", vips...))
	b.Run("move", func(b *testing.B) {
		for b.Loop() {
			p.configure(moved)
			p.configure(here)
		}
	})
	p.configure(moved)
	b.Run("hold", func(b *testing.B) {
		for b.Loop() {
			p.evaluate()
		}
	})
	p.configure(here)
	none := state
	none.VIPs = nil
	for name, s := range map[string]plan.State{"confirm nothing new": state, "confirm all": none} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				p.confirmState(s)
				p.confirmState(state)
			}
		})
	}
}

func TestMarks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var m marks
		m.reset(1000)
		for range rapid.IntRange(1, 4).Draw(t, "rounds") {
			added := rapid.SliceOf(rapid.IntRange(0, 999)).Draw(t, "added")
			for _, i := range added {
				m.add(i)
			}
			slices.Sort(added)
			var got []int
			m.take(func(i int) { got = append(got, i) })
			if want := slices.Compact(added); !slices.Equal(got, want) {
				t.Fatalf("%v, want %v", got, want)
			}
		}
	})
}
