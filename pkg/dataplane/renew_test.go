package dataplane

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/record"
)

// A pod's sandbox was made anew, and its volumes stayed: records of what a network
// namespace had that is gone are no drift.
func TestRecordsOfAnotherNamespaceAreMadeAgain(t *testing.T) {
	w := newWorld()
	wanted := wantedOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("a1", Serving), testTarget("a2", Serving)))
	w.settle(wanted, false)
	w.expect(t, "a", "a1", "a2")

	w.k = newModelKernel()
	w.e = newEngine(Options{Log: w.e.log}.withDefaults(), w.k, w.l)
	if err := w.e.rebuild(nil); err != nil {
		t.Fatal(err)
	}
	if err := w.e.load(); err != nil {
		t.Fatal(err)
	}
	w.e.pass(nil, false)
	if drift := w.state().Drift; len(drift) > 0 {
		t.Errorf("drift: %+v", drift)
	}
	if w.k.writes > 0 {
		t.Error("something was written before it was known what is wanted")
	}
	w.settle(wanted, false)
	w.expect(t, "a", "a1", "a2")
	if s := w.state(); len(s.Drift)+len(s.Problems) > 0 || len(s.VIPs) != 1 {
		t.Errorf("%+v", s)
	}
}

// As long as anything of it stands, somebody removed the rest by hand.
func TestRecordsOfAKernelThatHasAPartOfThemStay(t *testing.T) {
	w := newWorld()
	wanted := wantedOf(testStream("a", []string{"20.0.0.1/32"}, testTarget("a1", Serving)))
	w.settle(wanted, false)
	n := w.number("a", "a1")
	w.k.streams, w.k.vips, w.k.base = map[string]*streamContent{}, nil, false
	w.k.slots[n] = &slotContent{number: n, rules: w.k.slots[n].rules, hops: w.k.slots[n].hops, blackhole: w.k.slots[n].blackhole}
	if err := w.e.rebuild(nil); err != nil {
		t.Fatal(err)
	}
	if got := w.l.Targets[n].Stage; got != record.Applied {
		t.Errorf("the record is at stage %d", got)
	}
}
