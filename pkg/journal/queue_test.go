package journal

import (
	"context"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vipgate/vipgate/pkg/readiness"
)

// newQueue returns a queue of deltas.
func newQueue() *Queue[Delta] {
	return NewQueue(Delta.Len, func(all []Delta) (Delta, int) {
		lost := 0
		for _, delta := range all {
			lost += delta.Len()
		}
		merged := MergeDeltas(all)
		return merged, lost - merged.Len()
	})
}

func delta(count, version int) (all Delta) {
	for i := range count {
		all.Changed = append(all.Changed, readiness.VIPReadiness{VIP: numbered(i), ReadyTargets: uint32(version)})
	}
	return all
}

func TestSettleFollowsTheSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		delay := time.Duration(0)
		settled := func(q *Queue[Delta]) time.Duration {
			start := time.Now()
			q.Settle(t.Context(), delay)
			return time.Since(start)
		}
		queue := newQueue()
		queue.Add(delta(1, 0))
		if wait := settled(queue); wait != 0 {
			t.Errorf("one VIP settles after %v without a delay", wait)
		}
		delay = UpdateDelay
		one := settled(queue)
		queue.Add(delta(10_000, 1))
		many := settled(queue)
		if one != delay || many <= 5*one {
			t.Errorf("one VIP settles after %v, 10 000 after %v", one, many)
		}
		// Changes that arrive during the wait prolong it, up to the limit.
		time.AfterFunc(one, func() { queue.Add(delta(500_000, 2)) })
		if wait := settled(queue); wait <= many || wait > delay+maxSettle {
			t.Errorf("with more VIPs during the wait it settles after %v, outside %v…%v", wait, many, maxSettle)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		start := time.Now()
		queue.Settle(ended, time.Hour)
		if wait := time.Since(start); wait != 0 {
			t.Errorf("with an ended context it settles after %v", wait)
		}
	})
}

func TestLargeBatchesAreCollected(t *testing.T) {
	queue := newQueue()
	collections := func(vips int) uint32 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		queue.Add(delta(vips, 0))
		queue.Drain(func([]Delta, int) {})
		runtime.ReadMemStats(&after)
		return after.NumForcedGC - before.NumForcedGC
	}
	if few, many := collections(collectVIPs-1), collections(collectVIPs); few != 0 || many != 1 {
		t.Errorf("%d forced collections after few VIPs, %d after many", few, many)
	}
}

func TestQueueKeepsTheOrder(t *testing.T) {
	q := newQueue()
	for round := range 3 {
		if q.Drain(func([]Delta, int) { t.Error("an empty queue was applied") }) || !q.Idle() {
			t.Error("an empty queue is not idle")
		}
		for i := range 5 {
			q.Add(delta(1, 10*round+i))
		}
		if len(q.Wake()) != 1 || q.Idle() {
			t.Error("no wakeup, or idle with queued batches")
		}
		var got []uint32
		if !q.Drain(func(all []Delta, lost int) {
			if q.Idle() || lost != 0 {
				t.Errorf("idle %t while batches are applied, %d lost", q.Idle(), lost)
			}
			q.Add(delta(1, 10*round+5)) // must not disturb the batches that are applied
			for _, d := range all {
				got = append(got, d.Changed[0].ReadyTargets)
			}
		}) || q.Idle() {
			t.Error("nothing was applied, or idle with a queued batch")
		}
		q.Drain(func(all []Delta, _ int) { got = append(got, all[0].Changed[0].ReadyTargets) })
		want := []uint32{0, 1, 2, 3, 4, 5}
		for i := range want {
			want[i] += uint32(10 * round)
		}
		if !slices.Equal(got, want) {
			t.Errorf("round %d: got %v", round, got)
		}
	}
	if n := testing.AllocsPerRun(100, func() {
		q.Add(Delta{})
		q.Drain(func([]Delta, int) {})
	}); n != 0 {
		t.Errorf("%v allocations of an Add", n)
	}
}

// A queue that is not drained keeps the newest state of each VIP. With more VIPs than its limit, it
// must not merge at every Add.
func TestQueueIsBounded(t *testing.T) {
	for _, vips := range []int{1, maxQueued + 1000} {
		q, merges := newQueue(), 0
		merge := q.merge
		q.merge = func(all []Delta) (Delta, int) {
			merges++
			return merge(all)
		}
		added, all := 0, delta(vips, 0).Changed
		for i := 0; added < 3*maxQueued; i++ {
			if all = slices.Clone(all); vips == 1 || i < 8 {
				all[0].ReadyTargets = uint32(i)
			}
			q.Add(Delta{Changed: all})
			added += vips
			if q.queued > 4*maxQueued {
				t.Fatalf("%d VIPs are queued", q.queued)
			}
		}
		if merges == 0 || merges > 6 {
			t.Errorf("%d merges", merges)
		}
		q.Drain(func(all []Delta, lost int) {
			newest := all[len(all)-1].Changed
			if int(newest[0].ReadyTargets) != added/vips-1 {
				t.Errorf("the newest state is %d", newest[0].ReadyTargets)
			}
			kept := 0
			for _, d := range all {
				kept += d.Len()
			}
			if kept+lost != added {
				t.Errorf("%d kept, %d lost of %d", kept, lost, added)
			}
		})
	}
}
