package dataplane

import (
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A draining target keeps its established flows until they end or its drain time ends, regardless
// of concurrent changes of its stream.
func TestDrainSurvivesOtherChanges(t *testing.T) {
	vips := []string{"20.0.0.1/32"}
	w := newModelFixture()
	w.settle(desiredOf(testStream("a", vips, testTarget("x1", plan.Serving), testTarget("x2", plan.Serving))), false)
	left := testStream("a", vips, testTarget("x1", plan.Serving))
	w.settle(desiredOf(left), false)
	number, end := w.number("a", "x2"), w.clock.Add(left.DrainTime)
	w.k.conns[number] = true
	drains := func(when string) {
		t.Helper()
		if s := w.slot("a", "x2"); s == nil || !s.Flows[vip.IPv4] || !w.k.conns[number] {
			t.Fatalf("%s: x2 is to keep its flows until its time is over: %+v", when, s)
		}
		if got := w.e.deadlines(); len(got) != 1 || !got[0].Equal(end) {
			t.Fatalf("%s: the drain ends at %s, not %s", when, got, end)
		}
	}
	drains("left out")

	w.clock = w.clock.Add(time.Second)
	w.settle(desiredOf(testStream("a", vips, testTarget("x1", plan.Serving), testTarget("x3", plan.Serving))), false)
	w.expect(t, "a", "x1", "x3")
	drains("another target came")

	w.clock = w.clock.Add(time.Second)
	w.settle(desiredOf(testStream("a", vips, testTarget("x1", plan.Down), testTarget("x3", plan.Serving))), false)
	w.expect(t, "a", "x3")
	drains("another target is down")

	w.restart()
	last := desiredOf(testStream("a", append(vips, "20.0.0.2/32"), testTarget("x3", plan.Serving)))
	w.settle(last, false)
	drains("a restart, another VIP, and one that is gone at once")

	w.clock = end.Add(-time.Millisecond)
	w.settle(last, false)
	drains("a moment before the end")
	w.clock = end
	w.settle(last, false)
	if w.slot("a", "x2") != nil || w.k.conns[number] {
		t.Error("x2 is there after its drain time")
	}
}
