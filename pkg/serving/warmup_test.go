package serving

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
)

// A target that becomes ready counts a tenth more with each tenth of its warmup. The first ready
// targets of a stream count fully, and so does one that was overdue.
func TestWarmup(t *testing.T) {
	s := streamOf("s", vipA)
	s.Check.Warmup = 30 * time.Second
	r := newRig(t, Options{Settle: 5 * time.Second}, targets("s",
		member("a", "172.16.0.1"), member("b", "172.16.0.2"), member("c", "172.16.0.3")))
	want := func(what string, tenths uint32) {
		t.Helper()
		if got := r.e.of(vipA); got.WarmingTenths != tenths {
			t.Errorf("%s: %d of %d targets ready, less %d tenths, want %d", what, got.ReadyTargets, got.TotalTargets,
				got.WarmingTenths, tenths)
		}
	}
	after := func(seconds time.Duration) Result {
		r.now = r.now.Add(seconds * time.Second)
		return r.evaluate()
	}
	r.configure(trenchOf(s))
	r.health("s", "a", healthcheck.Ready)
	r.health("s", "b", healthcheck.Ready)
	want("the wait for first verdicts", 0)
	r.health("s", "c", healthcheck.NotReady)
	want("the first ready targets", 0)

	r.health("s", "c", healthcheck.Ready)
	want("a target that recovered", 9)
	if next := after(2).Next; next.IsZero() || next.After(r.now.Add(time.Second)) {
		t.Errorf("the next evaluation is due at %v, it is %v", next, r.now)
	}
	want("2 s", 9)
	after(4)
	want("6 s", 8)
	r.health("s", "c", healthcheck.Overdue)
	want("overdue", 0)
	r.health("s", "c", healthcheck.Ready)
	r.configure(trenchOf(s))
	want("no longer overdue", 8)
	after(21)
	want("27 s", 1)
	if next := after(3).Next; !next.IsZero() {
		t.Errorf("the next evaluation is due at %v", next)
	}
	want("30 s", 0)

	r.health("s", "a", healthcheck.NotReady)
	r.health("s", "b", healthcheck.NotReady)
	r.health("s", "c", healthcheck.NotReady)
	r.health("s", "c", healthcheck.Ready)
	want("all targets failed before", 9)
	r.members["s"] = append(r.members["s"], member("d", "172.16.0.4"))
	r.retarget("s")
	r.health("s", "d", healthcheck.Ready)
	want("a new target", 18)
	s.Check.Warmup = 0
	r.configure(trenchOf(s))
	want("no warmup", 0)
}
