package dataplane

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

func drawDesired(t *rapid.T) *plan.Desired {
	var streams []*plan.Stream
	for _, name := range []string{"a", "b", "c"} {
		if rapid.IntRange(0, 4).Draw(t, "without") == 0 {
			continue
		}
		s := &plan.Stream{
			Name: name, Size: rapid.SampledFrom([]uint32{7, 13}).Draw(t, "size"), Seed: rapid.SampledFrom([]uint32{1, 2}).Draw(t,
				"seed"),
			DrainTime: rapid.SampledFrom([]time.Duration{0, 10 * time.Second}).Draw(t, "drain"),
			RouteAll:  rapid.Bool().Draw(t, "route all"),
		}
		for _, p := range siteMatch {
			if rapid.Bool().Draw(t, "match") {
				s.Match = append(s.Match, p)
			}
		}
		for _, v := range []string{"20.0.0.1/32", "20.0.0.2/32", "2000::1/128", "20.1.0.0/24"} {
			if rapid.Bool().Draw(t, "vip") {
				s.VIPs = append(s.VIPs, vip.Require(v))
			}
		}
		for _, target := range []string{"x1", "x2", "y1", "y2"} {
			if rapid.IntRange(0, 3).Draw(t, "left out") == 0 {
				continue
			}
			roles := []plan.Role{rapid.SampledFrom([]plan.Role{
				plan.Down, plan.Draining, plan.Serving,
				plan.Serving,
			}).Draw(t, "role4")}
			if target[0] == 'x' {
				roles = append(roles, rapid.SampledFrom([]plan.Role{
					plan.Down, plan.Draining, plan.Serving,
					plan.Serving,
				}).Draw(t, "role6"))
			}
			x := testTarget(target, roles...)
			if rapid.IntRange(0, 5).Draw(t, "moved") == 0 {
				x.IPs[0] = x.IPs[0].Next()
			}
			s.Targets = append(s.Targets, x)
		}
		streams = append(streams, s)
	}
	return desiredOf(streams...)
}

func TestAnyChangesAndKillsConverge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModelFixture()
		for range rapid.IntRange(1, 6).Draw(t, "changes") {
			desired := drawDesired(t)
			births := maps.Clone(w.k.births)
			stayed := map[uint32]string{}
			for n, s := range w.k.Targets {
				stayed[n] = s.Stream + "/" + s.Name
			}
			for range rapid.IntRange(0, 3).Draw(t, "kills") {
				w.k.left = rapid.IntRange(0, 12).Draw(t, "acts")
				if !w.settle(desired, false) {
					w.restart()
				}
				w.k.left = -1
			}
			w.settle(desired, false)
			// Draining targets are removed after the drain time.
			w.clock = w.clock.Add(time.Minute)
			w.settle(desired, false)
			if w.e.readErr != nil {
				t.Fatal(w.e.readErr)
			}
			for n := range w.e.targets {
				if w.e.targets[n].Stage != plan.StageApplied {
					t.Fatalf("record %+v", w.e.targets[n])
				}
			}
			// A target without flows is installed if an earlier state, or a killed process, recorded it,
			// and no other target got its fwmark with its addresses.
			if diff := cmp.Diff(wish(desired, w.had()), w.is(t)); diff != "" {
				t.Fatalf("-desired +kernel\n%s", diff)
			}
			w.checkTables(t)
			if len(w.k.Guests) > 0 {
				t.Fatalf("guests %v drain forever", w.k.Guests)
			}
			for n, name := range stayed {
				if s := w.k.Targets[n]; s != nil && s.Stream+"/"+s.Name == name && w.k.births[n] != births[n] {
					t.Fatalf("the chain of %s, which stayed, was rebuilt", name)
				}
			}
			s := w.state()
			if len(s.Drift) > 0 {
				t.Fatalf("drift %+v", s.Drift)
			}
			for _, p := range s.Problems {
				if len(p.VIPs) == 0 {
					t.Fatalf("problem %+v", p)
				}
			}
			for v, by := range w.k.VIPs {
				if s.VIPs[v] != by {
					t.Fatalf("the state says %s for %s, the kernel %s", s.VIPs[v], v, by)
				}
			}
			for name, stream := range desired.Streams {
				checkFWMarks(t, w, stream, s.Streams[name])
				for _, f := range vip.Families {
					if got := slices.Sorted(maps.Keys(s.Streams[name].Serving[f])); !slices.Equal(got, w.serving(name, f)) {
						t.Fatalf("stream %s: the state says that %q serve, the kernel %q", name, got, w.serving(name, f))
					}
				}
			}
			writes := w.k.writes
			w.notice()
			w.settle(desired, false)
			if w.k.writes != writes {
				t.Fatalf("something was written though nothing changed")
			}
		}
	})
}

// checkFWMarks checks that each target of a stream has a routed fwmark.
func checkFWMarks(t *rapid.T, w *modelFixture, s *plan.Stream, state *plan.StreamState) {
	t.Helper()
	for _, x := range s.Targets {
		for _, a := range x.IPs {
			n, ok := state.FWMarks[a]
			if ok != s.RouteAll {
				t.Fatalf("target %s/%s: fwmark %d for %s", s.Name, x.Name, n, a)
			}
			if k := w.k.Targets[n]; ok && k.NextHops[vip.FamilyOf(a)] != a {
				t.Fatalf("target %s/%s: fwmark %d leads to %s instead of %s", s.Name, x.Name, n, k.NextHops, a)
			}
		}
	}
}

// tamper removes or changes an object like another process.
func tamper(t *rapid.T, k *modelKernel) {
	k.gen++
	numbers := slices.Sorted(maps.Keys(k.Targets))
	streams := slices.Sorted(maps.Keys(k.Streams))
	vips := slices.SortedFunc(maps.Keys(k.VIPs), vip.Compare)
	f := rapid.SampledFrom(vip.Families[:]).Draw(t, "family")
	switch what := rapid.IntRange(0, 10).Draw(t, "what"); {
	case what == 0:
		k.Base = false
		clear(k.Streams)
		clear(k.VIPs)
		for _, s := range k.Targets {
			s.ChainIntact, s.Label, s.Flows = false, plan.Label{}, [2]bool{}
		}
	case what == 1 && len(vips) > 0:
		delete(k.VIPs, rapid.SampledFrom(vips).Draw(t, "vip"))
	case what == 2 && len(streams) > 0:
		s := k.Streams[rapid.SampledFrom(streams).Draw(t, "stream")]
		if s.Tables[f] != nil {
			s.Tables[f][rapid.IntRange(0, len(s.Tables[f])-1).Draw(t, "entry")] = 0
		}
	case what == 3 && len(streams) > 0:
		k.Streams[rapid.SampledFrom(streams).Draw(t, "stream")].ChainIntact = false
	case what == 4 && len(numbers) > 0:
		k.Targets[rapid.SampledFrom(numbers).Draw(t, "number")].Rules[f] = false
	case what == 5 && len(numbers) > 0:
		s := k.Targets[rapid.SampledFrom(numbers).Draw(t, "number")]
		s.NextHops[f], s.Blackhole[f] = netip.Addr{}, false
	case what == 6 && len(numbers) > 0:
		s := k.Targets[rapid.SampledFrom(numbers).Draw(t, "number")]
		s.ChainIntact = false
	case what == 7 && len(numbers) > 0:
		s := k.Targets[rapid.SampledFrom(numbers).Draw(t, "number")]
		if s.NextHops[f].IsValid() {
			s.NextHops[f] = s.NextHops[f].Next()
		}
	case what == 8 && len(numbers) > 0:
		k.Targets[rapid.SampledFrom(numbers).Draw(t, "number")].Blackhole[f] = false
	case what == 9 && len(streams) > 0:
		s := k.Streams[rapid.SampledFrom(streams).Draw(t, "stream")]
		s.Match = rapid.SampledFrom([][]plan.Port{nil, {}, siteMatch, siteMatch[1:]}).Draw(t, "ports")
	case what == 10:
		k.unchecked = true
	}
}

func TestDriftIsRepaired(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModelFixture()
		desired := drawDesired(t)
		w.settle(desired, false)
		repaired := 0
		w.e.repairs.report = func(r []Repaired) { repaired += len(r) }
		before := w.kernel()
		for range rapid.IntRange(1, 4).Draw(t, "tamperings") {
			tamper(t, w.k)
		}
		different := !sameKernel(before, w.kernel())
		restart := rapid.Bool().Draw(t, "restart")
		if restart {
			w.restart()
		}
		w.notice()
		w.settle(desired, false)
		if drift := w.e.drift(); len(drift) > 0 {
			t.Fatalf("drift: %+v", drift)
		}
		if !restart && different != (repaired > 0) {
			t.Fatalf("changed: %v; repaired: %d", different, repaired)
		}
		if diff := cmp.Diff(wish(desired, w.had()), w.is(t)); diff != "" {
			t.Fatalf("-desired +kernel\n%s", diff)
		}
		w.checkTables(t)
	})
}

func TestHeldDriftStaysUntilResumed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModelFixture()
		desired := drawDesired(t)
		w.settle(desired, false)
		w.notice()
		w.settle(desired, false)
		w.e.holds.until[allStreams] = time.Time{}
		had := w.had()
		before := w.kernel()
		tamperings := rapid.IntRange(1, 4).Draw(t, "tamperings")
		for range tamperings {
			tamper(t, w.k)
		}
		handed := w.kernel()
		different := !sameKernel(before, handed)
		w.notice()
		w.settle(desired, false)
		drift := w.e.drift()
		if different != (len(drift) > 0) {
			t.Fatalf("changed by another process: %v; drift: %+v", different, drift)
		}
		// The next process cannot recover a stream or target without remaining objects.
		known := tamperings == 1
		for name, s := range desired.Streams {
			known = known && slices.ContainsFunc(s.Targets,
				func(t plan.Target) bool { return had[name+"/"+t.Name] && slices.Contains(t.Roles[:], plan.Serving) })
		}
		if known && rapid.Bool().Draw(t, "restart") {
			w.restart()
			w.settle(desired, false)
			if again := w.e.drift(); len(again) != len(drift) {
				t.Fatalf("drift is %+v after a restart, was %+v", again, drift)
			}
		}
		untouched := func(when string) {
			for n, s := range w.k.Targets {
				h := handed.Targets[n]
				if h == nil {
					h = &plan.KernelTarget{FWMark: n}
				}
				if *h != *s {
					t.Fatalf("%s: number %d was repaired: %+v became %+v", when, n, *h, *s)
				}
			}
			for name, s := range handed.Streams {
				if now := w.k.Streams[name]; !s.ChainIntact && now.ChainIntact {
					t.Fatalf("%s: the chain of %s was repaired", when, name)
				}
			}
			if len(w.k.Streams) != len(handed.Streams) || !maps.Equal(w.k.VIPs, handed.VIPs) ||
				w.k.Base != (handed.Problem == "") {
				t.Fatalf("%s: table, streams or VIPs were repaired", when)
			}
		}
		untouched("held")
		// A target that receives no forwarded packets does not serve.
		for name, ss := range w.state().Streams {
			for _, f := range vip.Families {
				for target := range ss.Serving[f] {
					if !plan.Forwards(w.e.targets[w.number(name, target)], w.slot(name, target), f) {
						t.Fatalf("%s/%s serves though it is broken", name, target)
					}
				}
			}
		}
		if done, err := w.e.reconcile(desired); err != nil || len(done) > 0 {
			t.Fatalf("reconcile repaired %+v, %v", done, err)
		}
		untouched("reconcile")
		clear(w.e.holds.until)
		done, err := w.e.reconcile(desired)
		if err != nil {
			t.Fatalf("resume: %v", err)
		}
		if len(done) != len(drift) {
			t.Fatalf("repaired %+v, drift was %+v", done, drift)
		}
		if diff := cmp.Diff(wish(desired, had), w.is(t)); diff != "" {
			t.Fatalf("-desired +kernel\n%s", diff)
		}
		w.checkTables(t)
	})
}

func TestCleanupRemovesEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModelFixture()
		w.k.left = rapid.IntRange(0, 40).Draw(t, "acts")
		w.settle(drawDesired(t), false)
		w.k.left = -1
		if _, err := cleanUp(w.k, w.e.options); err != nil {
			t.Fatal(err)
		}
		if w.k.Base || len(w.k.Targets)+len(w.k.Streams)+len(w.k.VIPs) > 0 {
			t.Fatalf("left: %+v", w.k.KernelState)
		}
	})
}
