package dataplane

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// named gives a target another name.
func named(name string, target plan.Target) plan.Target {
	target.Name = name
	return target
}

// A fwmark follows the addresses of its target: flows have it as connection mark.
func TestFWMarksFollowAddresses(t *testing.T) {
	const serving = plan.Serving
	x1, x2, y1 := testTarget("x1", serving), testTarget("x2", serving), testTarget("y1", serving)
	stream := func(name string, targets ...plan.Target) *plan.Stream {
		return testStream(name, []string{"20.0.0.1/32"}, targets...)
	}
	prepared := testStream("b", nil, x1, x2)
	prepared.Prepare[vip.IPv4] = true
	for _, test := range []struct {
		name  string
		steps []*plan.Desired
		want  map[string]string // the new "STREAM/TARGET" of the fwmarks of a/x1 and a/x2
		// guests lists the streams that keep flows of x1 or x2 besides its own, as "STREAM TARGET".
		guests []string
	}{
		{
			"stream renamed",
			[]*plan.Desired{desiredOf(stream("b", x1, x2))},
			map[string]string{"x1": "b/x1", "x2": "b/x2"},
			nil,
		},
		{
			"stream renamed after its preparation",
			[]*plan.Desired{desiredOf(stream("a", x1, x2), prepared), desiredOf(stream("b", x1, x2))},
			map[string]string{"x1": "b/x1", "x2": "b/x2"},
			nil,
		},
		{
			"targets renamed",
			[]*plan.Desired{desiredOf(stream("a", named("p", x1), named("q", x2)))},
			map[string]string{"x1": "a/p", "x2": "a/q"},
			nil,
		},
		{
			"addresses swapped",
			[]*plan.Desired{desiredOf(stream("a", named("x2", x1), named("x1", x2)))},
			map[string]string{"x1": "a/x2", "x2": "a/x1"},
			nil,
		},
		{
			"addresses swapped in two streams that share them",
			[]*plan.Desired{
				desiredOf(stream("a", x1, x2), testStream("Z", []string{"20.0.0.2/32"}, named("p", x1), named("q", x2))),
				desiredOf(stream("a", named("x2", x1), named("x1", x2)),
					testStream("Z", []string{"20.0.0.2/32"}, named("q", x1), named("p", x2))),
			},
			map[string]string{"x1": "a/x2", "x2": "a/x1"},
			nil,
		},
		{
			"address taken by another target of the stream",
			[]*plan.Desired{desiredOf(stream("a", named("x2", x1), named("x1", y1)))},
			map[string]string{"x1": "a/x2", "x2": "a/x2@5001"}, // 10.0.120.50 drains
			nil,
		},
		{
			"address moved to another stream",
			[]*plan.Desired{desiredOf(stream("a", x1), testStream("b", []string{"20.0.0.2/32"}, x2))},
			map[string]string{"x1": "a/x1", "x2": "b/x2"},
			[]string{"a x2"},
		},
		{
			"VIP moved",
			[]*plan.Desired{desiredOf(testStream("a", []string{"20.0.0.9/32"}, x1, x2), stream("b", y1))},
			map[string]string{"x1": "a/x1", "x2": "a/x2"},
			[]string{"b x1", "b x2"},
		},
		{
			"VIP moved to and fro",
			[]*plan.Desired{
				desiredOf(testStream("a", []string{"20.0.0.9/32"}, x1, x2), stream("b", y1)),
				desiredOf(stream("a", x1, x2), testStream("b", []string{"20.0.0.9/32"}, y1)),
			},
			map[string]string{"x1": "a/x1", "x2": "a/x2"},
			[]string{"a y1", "b x1", "b x2"},
		},
		{
			"VIP moved twice",
			[]*plan.Desired{
				desiredOf(testStream("a", []string{"20.0.0.9/32"}, x1, x2), stream("b", y1)),
				desiredOf(testStream("a", []string{"20.0.0.9/32"}, x1, x2), stream("c", testTarget("z1", serving))),
			},
			map[string]string{"x1": "a/x1", "x2": "a/x2"},
			[]string{"c x1", "c x2"},
		},
		{
			"VIP moved, then its old targets leave",
			[]*plan.Desired{
				desiredOf(testStream("a", []string{"20.0.0.9/32"}, x1, x2), stream("b", y1)),
				desiredOf(testStream("a", []string{"20.0.0.9/32"}, x1), stream("b", y1)),
			},
			map[string]string{"x1": "a/x1", "x2": "a/x2"},
			[]string{"b x1", "b x2"},
		},
		{
			"stream replaced by one of other targets",
			[]*plan.Desired{desiredOf(stream("b", y1))},
			map[string]string{"x1": "b/x1@5000", "x2": "b/x2@5001"},
			nil,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newModelFixture()
			w.settle(desiredOf(stream("a", x1, x2)), false)
			fwmarks := map[string]uint32{"x1": w.number("a", "x1"), "x2": w.number("a", "x2")}
			for _, number := range fwmarks {
				w.k.conns[number] = true
			}
			for _, desired := range test.steps {
				w.settle(desired, false)
			}
			for target, want := range test.want {
				stream, name, _ := strings.Cut(want, "/")
				fwmark := fwmarks[target]
				got := w.k.Targets[fwmark]
				if got == nil || got.Stream != stream || got.Name != name || !got.Flows[vip.IPv4] || !w.k.conns[fwmark] {
					t.Errorf("fwmark %d of %s: %+v, connections: %v; want %s", fwmark, target, got, w.k.conns[fwmark], want)
				}
			}
			var guests []string
			for guest := range w.k.Guests {
				guests = append(guests, guest.Stream+" "+w.k.Targets[guest.FWMark].Name)
			}
			if slices.Sort(guests); !slices.Equal(guests, test.guests) {
				t.Errorf("guests %v, want %v", guests, test.guests)
			}
			if s := w.state(); len(s.Drift)+len(s.Problems) > 0 {
				t.Errorf("drift %+v, problems %+v", s.Drift, s.Problems)
			}
			w.checkTables(t)
			// A restart changes nothing, and drains end.
			before := w.k.writes
			w.restart()
			last := test.steps[len(test.steps)-1]
			if w.settle(last, false); w.k.writes != before {
				t.Errorf("a restart wrote %d times", w.k.writes-before)
			}
			w.clock = w.clock.Add(time.Minute)
			w.settle(last, false)
			if len(w.k.Guests) > 0 {
				t.Errorf("guests %v drain forever", w.k.Guests)
			}
			for _, got := range w.k.Targets {
				if strings.Contains(got.Name, "@") {
					t.Errorf("%+v drains forever", got)
				}
			}
		})
	}
}

// In the kernel, too, a renamed stream keeps the fwmarks and leaves nothing of its old name.
func TestRenamedStreamKeepsFWMarks(t *testing.T) {
	x := newSite(t)
	p := x.start()
	pair := []plan.Target{siteTarget(1, plan.Serving, plan.Serving), siteTarget(2, plan.Serving, plan.Serving)}
	p.configure(siteStream("a", bothVIPs, pair...))
	first, second := x.number("a", "t1"), x.number("a", "t2")
	routes := x.sh("ip rule; ip -6 rule; ip route show table all proto 179; ip -6 route show table all proto 179")

	prepared := siteStream("b", nil, pair...)
	prepared.Prepare = [2]bool{true, true}
	p.Configure(desiredOf(siteStream("a", bothVIPs, pair...), prepared))
	p.wait("the new stream to be prepared", func(s plan.State) bool {
		return serves(s, "b", vip.IPv4, "t1", "t2") && serves(s, "b", vip.IPv6, "t1", "t2") && len(s.Problems) == 0
	})
	renamed := siteStream("b", bothVIPs, pair...)
	renamed.DrainTime = 0
	s := p.configure(renamed)
	if !serves(s, "b", vip.IPv4, "t1", "t2") || s.VIPs[vip.Require(bothVIPs[0])] != "b" {
		t.Fatal(describeState(s))
	}
	if got := []string{x.number("b", "t1"), x.number("b", "t2")}; got[0] != first || got[1] != second {
		t.Errorf("fwmarks are %v, want %s and %s", got, first, second)
	}
	// The fwmarks of the preparation drain for the drain time of its configuration.
	x.eventually("the fwmarks of the preparation to be gone", func() bool {
		return x.sh("ip rule; ip -6 rule; ip route show table all proto 179; ip -6 route show table all proto 179") == routes
	})
	x.lacks(t, "stream/a", "live4/a", "live6/a", "maglev4/a", "t1@", "t2@")
	if s := p.State().Load(); len(s.Drift)+len(s.Problems) > 0 {
		t.Error(describeState(s))
	}
}
