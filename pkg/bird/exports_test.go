package bird

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// A gateway to which BIRD exports too few VIPs for longer than an export takes is short. Only
// then the exported VIPs are listed, at long intervals.
func TestShortExports(t *testing.T) {
	const a, b = "20.0.0.1/32", "20.0.0.2/32"
	synctest.Test(t, func(t *testing.T) {
		f := &fakeBIRD{up: true, exported: []string{a, b}}
		w := watch(t, f, 3*time.Second)
		lists := func() (n int) {
			f.with(func() { n = len(f.lists) })
			return n
		}
		want := func(short bool, exports string) {
			t.Helper()
			g := w.State().Load().Gateways[0]
			if g.Short != short || fmt.Sprint(g.Exports.Sorted()) != exports {
				t.Errorf("after %d lists short is %v with %v, want %v with %s", lists(), g.Short, g.Exports, short, exports)
			}
		}
		w.Expect(2, 0)
		w.skipFastPolls()
		want(false, "[]")

		f.with(func() { f.exported = []string{a} })
		w.after(exportTime - pollInterval)
		want(false, "[]") // a change takes that long
		w.after(2 * pollInterval)
		want(true, "["+a+"]")
		if n := lists(); n != 1 {
			t.Errorf("%d lists at first", n)
		}
		w.after(maxListAge - 2*time.Second)
		if n := lists(); n != 1 {
			t.Errorf("%d lists without a change", n)
		}
		w.after(3 * time.Second)
		want(true, "["+a+"]")
		if n := lists(); n != 2 {
			t.Errorf("%d lists after the age of one", n)
		}
		// A change of the counts is followed, and no list is needed for no VIP.
		f.with(func() { f.exported = []string{b} })
		w.Expect(3, 0)
		w.after(2 * time.Second)
		want(true, "["+b+"]")
		n := lists()
		f.with(func() { f.exported = nil })
		w.after(2 * time.Second)
		want(true, "[]")
		if w.State().Load().Gateways[0].Exports == nil || lists() != n {
			t.Errorf("%d lists of no VIP", lists()-n)
		}
		// BIRD exports all of them again, or the announcer withdrew them.
		f.with(func() { f.exported = []string{a} })
		w.Expect(1, 0)
		w.after(pollInterval)
		want(false, "[]")
		if g := w.State().Load().Gateways[0]; g.Announced != 1 || g.Exported != 1 {
			t.Errorf("%d of %d VIPs", g.Exported, g.Announced)
		}
		// A new session has the full export time.
		f.with(func() { f.exported = nil })
		w.after(exportTime + pollInterval)
		want(true, "[]")
		f.with(func() { f.up = false })
		w.after(pollInterval)
		want(false, "[]")
		f.with(func() { f.up = true })
		w.after(exportTime - pollInterval)
		want(false, "[]")
	})
}

func TestLoopbackState(t *testing.T) {
	for want, p := range map[string]Protocol{
		"Passive":        {State: "start", BGPState: "Passive"},
		"Established":    {State: "up", BGPState: "Established"},
		LoopbackDisabled: {State: "down", BGPState: "Down"},
		NoLoopbackSocket: {State: "down", Info: "Error: No listening socket"},
		"start":          {State: "start"},
	} {
		if got := loopback(p); got != want {
			t.Errorf("%+v is %q, want %q", p, got, want)
		}
	}
}

func TestParseRoutes(t *testing.T) {
	reply := Reply{
		{1007, "Table master4:"},
		{1007, "20.0.0.1/32          blackhole [LB 18:03:30.911] * (200) [i]"},
		{1007, "Table master6:"},
		{1007, "2000::1/128          blackhole [LB 18:03:30.911 from ::1] * (200) [i]"},
		{1007, "\tvia 192.0.2.1/24 on eth0"},
		{0, ""},
	}
	if got := fmt.Sprint(parseRoutes(reply).Sorted()); got != fmt.Sprint([]vip.VIP{
		vip.Require("20.0.0.1/32"), vip.Require("2000::1/128"),
	}) {
		t.Errorf("routes %s", got)
	}
}
