package dataplane

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// Failed attempts are not counted as repairs. The first success is reported, regardless of the
// number of attempts.
func TestRepairAfterFailures(t *testing.T) {
	var reported []Repaired
	e := newModelFixture().e
	e.repairs.report = func(list []Repaired) { reported = append(reported, list...) }
	e.observed = &plan.KernelState{Base: true}
	lost := []plan.Drift{{Object: "rule fwmark 5000 (IPv4)", Stream: "a"}}
	e.streams["a"] = &streamRecord{repair: true, drift: lost}
	for range 2 * contestedAfter {
		e.noteRepairs(lost, false)
	}
	e.streams["a"].drift = nil
	e.noteRepairs(lost, false)
	if len(reported) != 1 || reported[0].Contested || e.repairs.total != 1 {
		t.Errorf("%d repairs are counted, reported: %+v", e.repairs.total, reported)
	}
}

// The caller's context is the only limit for the repair of a large data plane.
func TestSlowRepair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := New(Options{})
		must(t, err)
		go func() {
			do := <-p.requests
			time.Sleep(25 * time.Second)
			do(nil)
		}()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if _, err := ask(ctx, p, "repair", func(*engine) (int, error) { return 0, nil }); err != nil {
			t.Error(err)
		}
	})
}
