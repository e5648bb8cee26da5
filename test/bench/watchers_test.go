package main

import (
	"math/rand/v2"
	"slices"
	"testing"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
)

func TestTally(t *testing.T) {
	entries := func(vips ...string) []*readinessv1.ReadinessGroup {
		return []*readinessv1.ReadinessGroup{{Vips: vips[:1]}, {Vips: vips[1:]}}
	}
	at := func(revision uint64) *readinessv1.Position { return &readinessv1.Position{Revision: revision} }
	var counted tally
	for _, m := range []*readinessv1.WatchReadinessResponse{
		{Position: at(1), Event: &readinessv1.WatchReadinessResponse_Snapshot{
			Snapshot: &readinessv1.Snapshot{Groups: entries("a", "b", "c")},
		}},
		{Position: at(1), Event: &readinessv1.WatchReadinessResponse_Heartbeat{Heartbeat: &readinessv1.Heartbeat{}}},
		{Position: at(2), Event: &readinessv1.WatchReadinessResponse_Delta{Delta: &readinessv1.Delta{
			Changed: entries("a", "b"), Removed: []string{"c"},
		}}},
		{Position: at(5), Event: &readinessv1.WatchReadinessResponse_Delta{Delta: &readinessv1.Delta{
			Changed: entries("a", "b", "a"),
		}}},
	} {
		counted.add(m)
	}
	if want := (tally{deltas: 2, entries: 6, twice: 1, revision: 5}); counted != want {
		t.Errorf("counted %+v, want %+v", counted, want)
	}
}

func TestFlap(t *testing.T) {
	vips := numberedVIPs(flapsPerDecision+1, oneFamily)
	up := make([]bool, len(vips))
	r := rand.New(rand.NewPCG(1, 1))
	table := readiness.NewTable(readiness.TableOptions{})
	table.Commit(decision(false, vips...))
	for range 20 {
		d := flap(r, vips, up)
		if len(d.Changed) != flapsPerDecision {
			t.Fatalf("%d changes, want %d", len(d.Changed), flapsPerDecision)
		}
		before := table.State().VIPs
		for _, c := range d.Changed {
			i := slices.IndexFunc(before, func(r readiness.VIPReadiness) bool { return r.VIP == c.VIP })
			if i < 0 || before[i].State == c.State {
				t.Fatalf("%s is %s already", c.VIP, c.State)
			}
		}
		table.Commit(d)
	}
}
