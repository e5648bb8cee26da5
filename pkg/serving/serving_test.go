package serving

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// twoStreams returns a rig with streams "one" and "two" that share vipA.
func twoStreams(t *testing.T) *rig {
	r := newRig(t, Options{}, map[string][]targetset.Member{"one": numbered(3), "two": numbered(1)})
	r.configure(&trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB, vip6}},
		Streams: []trench.Stream{
			{Name: "one", VIPs: []vip.VIP{vipA, vip6}, MinReady: 2},
			{Name: "two", VIPs: []vip.VIP{vipA}, MinReady: 1},
		},
	})
	return r
}

func TestReasons(t *testing.T) {
	r := twoStreams(t)
	r.want(vipA, vip.NotReady, reasonNotChecked, 0, 4)
	if got := r.want(vipB, vip.NotReady, readinessv1.VipReason_VIP_REASON_NO_STREAM, 0, 0); got.Detail == "" {
		t.Error("no detail")
	}
	for i := range 3 {
		r.set("one", fmt.Sprintf("t%d", i), fmt.Sprintf("fd00::%d", i+1), healthcheck.NotReady)
	}
	got := r.want(vip6, vip.NotReady, reasonTooFew, 0, 3)
	if !strings.Contains(got.Detail, "stream one: 0 of 3 targets ready, needs 2; t0 (fd00::1): connection refused") {
		t.Errorf("detail %q", got.Detail)
	}
	r.set("one", "t0", "fd00::1", healthcheck.Overdue)
	r.want(vip6, vip.NotReady, readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE, 0, 3)
}

func TestOneStreamWithEnoughTargets(t *testing.T) {
	r := twoStreams(t)
	r.set("one", "t0", "172.16.0.1", healthcheck.Ready)
	r.want(vipA, vip.NotReady, reasonNotChecked, 1, 4)
	r.set("one", "t1", "172.16.0.2", healthcheck.Ready)
	r.want(vipA, vip.Ready, reasonReady, 2, 4)
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	r.set("one", "t0", "172.16.0.1", healthcheck.NotReady)
	r.want(vipA, vip.Ready, reasonReady, 2, 4)
	r.set("two", "t0", "172.16.0.1", healthcheck.NotReady)
	r.want(vipA, vip.NotReady, reasonNotChecked, 1, 4)
}

func TestFamiliesAreIndependent(t *testing.T) {
	r := twoStreams(t)
	if changed := r.set("one", "t0", "172.16.0.1", healthcheck.Ready); !slices.Equal(changed, []vip.VIP{vipA}) {
		t.Fatalf("an IPv4 address changed %v", changed)
	}
	r.set("one", "t1", "172.16.0.2", healthcheck.Ready)
	r.want(vip6, vip.NotReady, reasonNotChecked, 0, 3)
}

func TestReloadKeepsHealth(t *testing.T) {
	r := twoStreams(t)
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	result := r.configure(&trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vip6}},
		Streams:   []trench.Stream{{Name: "two", VIPs: []vip.VIP{vipA, vip6}, MinReady: 1}},
	})
	if !slices.Equal(result.Removed, []vip.VIP{vipB}) {
		t.Errorf("removed %v", result.Removed)
	}
	if len(result.Changed) != 2 {
		t.Errorf("changed %v", result.Changed)
	}
	r.want(vipA, vip.Ready, reasonReady, 1, 1)
	r.want(vip6, vip.NotReady, reasonNotChecked, 0, 1)
}

// VIPs of one family do not wait for the source address of the other family's checks, and VIPs of
// that family rise with all of their targets.
func TestSettleWithoutSourceAddress(t *testing.T) {
	r := newRig(t, Options{Settle: time.Hour}, map[string][]targetset.Member{
		"s": {member("a", "172.16.0.1", "fd00::1"), member("b", "fd00::2")},
	})
	is := func(name, addr string, state healthcheck.State, deferred bool) healthcheck.Health {
		return healthcheck.Health{
			Key: healthcheck.Key{Stream: "s", Name: name, Addr: netip.MustParseAddr(addr)}, State: state, Deferred: deferred,
		}
	}
	r.configure(trenchOf(streamOf("s", vipA, vip6)))
	if result := r.evaluate(is("a", "172.16.0.1", healthcheck.Ready, false),
		is("a", "fd00::1", healthcheck.Starting, true), is("b", "fd00::2", healthcheck.Starting, false)); !result.Settling {
		t.Error("synced before a check that runs has a verdict")
	}
	if result := r.evaluate(is("b", "fd00::2", healthcheck.Starting, true)); result.Settling {
		t.Error("not synced, although no check runs")
	}
	r.want(vipA, vip.Ready, reasonReady, 1, 1)
	r.want(vip6, vip.NotReady, reasonNotChecked, 0, 2)
	r.evaluate(is("a", "fd00::1", healthcheck.Ready, false))
	r.want(vip6, vip.NotReady, reasonNotChecked, 1, 2)
	r.evaluate(is("b", "fd00::2", healthcheck.Ready, false))
	r.want(vip6, vip.Ready, reasonReady, 2, 2)
}

// A new stream waits until each of its targets has a verdict, for a bounded time.
func TestSettle(t *testing.T) {
	for name, c := range map[string]struct {
		second healthcheck.State
		after  time.Duration
		want   vip.State
	}{
		"one target of two":       {healthcheck.Starting, time.Second - 1, vip.NotReady},
		"both targets":            {healthcheck.NotReady, 0, vip.Ready},
		"the time to settle ends": {healthcheck.Starting, time.Second, vip.Ready},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Options{Settle: time.Second}, map[string][]targetset.Member{
				"s": {member("a", "172.16.0.1"), member("b", "172.16.0.2")},
			})
			r.configure(trenchOf(streamOf("s", vipA)))
			r.health("s", "a", healthcheck.Ready)
			if got := r.e.of(vipA); got.State != vip.NotReady || got.Reason != reasonNotChecked {
				t.Fatalf("%v (%v) before the second target has a verdict", got.State, got.Reason)
			}
			r.health("s", "b", c.second)
			r.now = r.now.Add(c.after)
			result := r.evaluate()
			if got := r.e.of(vipA); got.State != c.want {
				t.Errorf("%v (%v)", got.State, got.Reason)
			}
			if settling := c.want == vip.NotReady; result.Settling != settling || result.Next.IsZero() == settling {
				t.Errorf("settling %v until %v", result.Settling, result.Next)
			}
		})
	}
}

func TestOnlyDrainingTargets(t *testing.T) {
	r := twoStreams(t)
	for i := range 3 {
		r.set("one", fmt.Sprintf("t%d", i), fmt.Sprintf("fd00::%d", i+1), healthcheck.Ready)
	}
	r.want(vip6, vip.Ready, reasonReady, 3, 3)
	r.drain("one", "t0", time.Second)
	r.want(vip6, vip.Ready, reasonReady, 2, 3)
	// Two are needed and one is left: the one that drains longest makes up for it.
	r.drain("one", "t1", 9*time.Second)
	got := r.want(vip6, vip.Draining, reasonDraining, 1, 3)
	if !got.DrainEnd.Equal(r.now.Add(9 * time.Second)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(r.now))
	}
	if !strings.Contains(got.Detail, "1 of 3 targets ready, 2 draining, needs 2") {
		t.Errorf("detail %q", got.Detail)
	}
	r.drain("one", "t2", 5*time.Second)
	if got := r.want(vip6, vip.Draining, reasonDraining, 0, 3); !got.DrainEnd.Equal(r.now.Add(5 * time.Second)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(r.now))
	}
	// A draining target that fails its checks serves no flow.
	r.set("one", "t1", "fd00::2", healthcheck.NotReady)
	if got := r.want(vip6, vip.Draining, reasonDraining, 0, 3); !got.DrainEnd.Equal(r.now.Add(time.Second)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(r.now))
	}
	r.set("one", "t2", "fd00::3", healthcheck.NotReady)
	if got := r.want(vip6, vip.NotReady, reasonTooFew, 0, 3); !got.DrainEnd.IsZero() {
		t.Error("a VIP that does not drain has the end of a drain")
	}
}

func TestDetailNamesDrainingStream(t *testing.T) {
	r := twoStreams(t)
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	r.drain("two", "t0", time.Minute)
	got := r.e.of(vipA)
	if got.State != vip.Draining || got.Detail != "stream two: 0 of 1 targets ready, 1 draining, needs 1" {
		t.Errorf("%v: %s", got.State, got.Detail)
	}
}

func TestDrainedByOperator(t *testing.T) {
	r := twoStreams(t)
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	r.drain("two", "t0", -1)
	if got := r.want(vipA, vip.NotReady, reasonNotChecked, 0, 4); !strings.Contains(got.Detail, "stream one") {
		t.Errorf("detail %q", got.Detail)
	}
	r.drain("one", "t0", -1)
	got := r.want(vipA, vip.NotReady, reasonNotChecked, 0, 4)
	if !strings.Contains(got.Detail, "1 drained by an operator") {
		t.Errorf("detail %q", got.Detail)
	}
}

func TestUncheckedFamilyFollowsTheOther(t *testing.T) {
	r := twoStreams(t)
	r.configure(&trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vip6}},
		Streams: []trench.Stream{{
			Name: "two", VIPs: []vip.VIP{vipA, vip6}, MinReady: 1, Check: trench.Check{Families: trench.OnlyIPv4},
		}},
	})
	r.e.Targets()
	if changed := r.set("two", "t0", "172.16.0.1", healthcheck.Ready); !slices.Equal(changed, []vip.VIP{vipA, vip6}) {
		t.Errorf("changed %v", changed)
	}
	r.want(vip6, vip.Ready, reasonReady, 1, 1)
	views, _ := r.e.Targets()
	if len(views) != 2 {
		t.Errorf("%d addresses are shown, want 2", len(views))
	}
	for _, v := range views {
		if v.State != healthcheck.Ready {
			t.Errorf("%v is %v", v.Key, v.State)
		}
	}
}

func TestViewOfDrainingTarget(t *testing.T) {
	r := twoStreams(t)
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	r.e.Targets()
	r.drain("two", "t0", time.Minute)
	views, gone := r.e.Targets()
	if len(views) != 2 || len(gone) != 0 {
		t.Fatalf("%d addresses are shown, %v are gone", len(views), gone)
	}
	v := views[0]
	if v.State != healthcheck.Draining || v.Checks != healthcheck.Ready {
		t.Errorf("view %+v", v)
	}
	if v.DrainCause != "test" || !v.DrainEnd.Equal(r.now.Add(time.Minute)) {
		t.Errorf("drains until %v, %s", v.DrainEnd.Sub(r.now), v.DrainCause)
	}
	if v := views[1]; v.Checks != healthcheck.Starting || v.Addr != netip.MustParseAddr("fd00::1") {
		t.Errorf("view of an address that was not checked: %+v", v)
	}
}

func TestManyTargetsAreShownInOnePass(t *testing.T) {
	const n = 20_000
	members := map[string][]targetset.Member{}
	var changed []healthcheck.Health
	for i := range n {
		m := member(fmt.Sprint(i), netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String())
		members["s"] = append(members["s"], m)
		k := healthcheck.Key{Stream: "s", Name: m.Name, Addr: m.IPs[0]}
		changed = append(changed, healthcheck.Health{Key: k, State: healthcheck.Ready})
	}
	r := newRig(t, Options{}, members)
	r.configure(trenchOf(streamOf("s", vipA)))
	r.e.Targets()
	r.evaluate(changed...)
	// A pass over the stream for each of them would be 400 million steps.
	if views, _ := r.e.Targets(); len(views) != n {
		t.Errorf("%d targets are shown, want %d", len(views), n)
	}
}

// An answer of a target may have any characters.
func TestDetailIsBounded(t *testing.T) {
	for _, text := range []string{"x", "\u0437", "\u2026", "\xff"} {
		for start := range 4 {
			s := &stream{Stream: trench.Stream{Name: strings.Repeat("x", start) + strings.Repeat(text, 300)}}
			if got := s.describe(vip.IPv4); len(got) > readiness.MaxDetailBytes || !utf8.ValidString(got) {
				t.Errorf("%d bytes: %q", len(got), got)
			}
		}
	}
}
