package journal

import (
	"context"
	"iter"
	"runtime"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxQueued bounds the VIPs of queued batches; beyond that, batches are merged.
const maxQueued = 200_000

// maxSpare bounds the capacity for batches that a queue keeps.
const maxSpare = 1024

// UpdateDelay is the time in which BIRD sends the UPDATE of a flip: 0.3 ms. Recording competes with
// it for the processor and for BIRD, and would delay it by 0.2 to 0.4 ms.
const UpdateDelay = time.Millisecond

// BIRD feeds a gateway with 10 000 VIPs in 6 to 12 ms. Recording would delay the last by 5 ms.
const (
	settlePerVIP = 2 * time.Microsecond
	maxSettle    = 200 * time.Millisecond
)

// After changes of collectVIPs the garbage of their decision is collected, at most once per
// collectInterval: the next decision then ends before the heap has grown enough for a collection,
// which would take as long as the decision.
const (
	collectVIPs     = 1000
	collectInterval = 100 * time.Millisecond
)

// Queue passes batches of changed VIPs from a component that must not block to a recording one.
type Queue[B any] struct {
	size  func(B) int
	merge func([]B) (merged B, lost int)
	wake  chan struct{}

	mu      sync.Mutex
	batches []B
	spare   []B // empty, with the capacity for the next batches
	queued  int // VIPs in batches
	limit   int // of queued
	lost    int // changes that a merge replaced by later ones
	busy    bool

	collected time.Time // last collection; of the goroutine that calls Drain
}

// NewQueue returns an empty queue. size returns the number of VIPs in a batch. merge returns one
// batch with the newest state of each VIP, and the number of changes that are missing in it.
func NewQueue[B any](size func(B) int, merge func([]B) (B, int)) *Queue[B] {
	return &Queue[B]{size: size, merge: merge, wake: make(chan struct{}, 1), limit: maxQueued}
}

// Add queues a batch, which must not be modified afterwards. It does not block.
func (queue *Queue[B]) Add(batch B) {
	queue.mu.Lock()
	// The bound is kept here and not in Drain, whose goroutine may wait for a reader of the log.
	if queue.queued > queue.limit {
		merged, lost := queue.merge(queue.batches)
		queue.batches, queue.queued, queue.lost = []B{merged}, queue.size(merged), queue.lost+lost
		// With more VIPs than maxQueued, the next batches must not be merged one by one: each merge
		// takes milliseconds.
		queue.limit = max(maxQueued, 2*queue.queued)
	}
	queue.batches = append(queue.batches, batch)
	queue.queued += max(1, queue.size(batch))
	queue.mu.Unlock()
	latest.Wake(queue.wake)
}

// Wake returns a channel that holds a token after an Add.
func (queue *Queue[B]) Wake() <-chan struct{} { return queue.wake }

// Settle waits for as long as BIRD needs to send the queued changes to the gateways, or until ctx
// ends: for delay, and longer for many changes. Changes that arrive during the wait prolong it.
func (queue *Queue[B]) Settle(ctx context.Context, delay time.Duration) {
	for waited := time.Duration(0); ; {
		queue.mu.Lock()
		queued := queue.queued
		queue.mu.Unlock()
		// Whole milliseconds: a flip that arrives during the wait adds no second wait.
		wait := delay + min(time.Duration(queued)*settlePerVIP, maxSettle).Truncate(time.Millisecond)
		if wait <= waited || backoff.Sleep(ctx, wait-waited) != nil {
			return
		}
		waited = wait
	}
}

// Drain passes the queued batches to apply, unless there are none. lost is the number of changes
// that were merged into later ones. Drain reports whether it called apply.
func (queue *Queue[B]) Drain(apply func(batches []B, lost int)) bool {
	queue.mu.Lock()
	batches, lost, changes := queue.batches, queue.lost, queue.queued
	if len(batches) == 0 {
		queue.mu.Unlock()
		return false
	}
	queue.batches, queue.queued, queue.limit, queue.lost = queue.spare, 0, maxQueued, 0
	queue.spare, queue.busy = nil, true
	queue.mu.Unlock()
	apply(batches, lost)
	queue.release(batches)
	if changes >= collectVIPs && time.Since(queue.collected) >= collectInterval {
		runtime.GC()
		queue.collected = time.Now()
	}
	return true
}

func (queue *Queue[B]) release(batches []B) {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	queue.busy = false
	// Two slices take turns, so that an Add allocates nothing. A long one, of an overload, is freed.
	if clear(batches); cap(batches) <= maxSpare {
		queue.spare = batches[:0]
	}
}

// Idle reports whether every added batch was applied.
func (queue *Queue[B]) Idle() bool {
	queue.mu.Lock()
	defer queue.mu.Unlock()
	return len(queue.batches) == 0 && !queue.busy
}

// Delta is a change of the readiness of VIPs. It must not be modified.
type Delta struct {
	Changed []readiness.VIPReadiness
	Removed []vip.VIP
	// Complete reports whether VIPs that Changed lacks are unknown.
	Complete bool
}

// Len returns the number of VIPs.
func (delta Delta) Len() int { return len(delta.Changed) + len(delta.Removed) }

// Revisions yields the batches in their order. Those that follow from one large decision of the
// load balancer are one slice: it has several revisions, whose VIPs ascend, and each would have a
// log line and an event. of returns the report in a batch, and its decision's position, if any.
func Revisions[B any](batches []B, of func(B) (Delta, readiness.Position, bool)) iter.Seq[[]B] {
	return func(yield func([]B) bool) {
		for more := true; more && len(batches) > 0; {
			count, decided := 1, readiness.Position{}
			report, _, _ := of(batches[0])
			for joins := report.Len() > MaxSingle; joins && count < len(batches); {
				next, position, decides := of(batches[count])
				switch {
				case next.Complete || next.Len() > 0:
					joins, report = next.follows(report), next
				case decides: // another input is the cause of a second decision at a position
					joins, decided = position != decided, position
				}
				if joins {
					count++
				}
			}
			more = yield(batches[:count])
			batches = batches[count:]
		}
	}
}

// follows reports whether delta may be the revision after previous of a large decision.
func (delta Delta) follows(previous Delta) bool {
	if delta.Complete || previous.Complete || len(previous.Removed) > 0 || previous.Len() <= MaxSingle {
		return false
	}
	return len(delta.Changed) == 0 ||
		vip.Compare(previous.Changed[len(previous.Changed)-1].VIP, delta.Changed[0].VIP) < 0
}

// MergeDeltas returns the newest readiness of each VIP.
func MergeDeltas(deltas []Delta) (merged Delta) {
	newest := map[vip.VIP]*readiness.VIPReadiness{} // nil: removed
	for _, delta := range deltas {
		if delta.Complete {
			clear(newest)
			merged.Complete = true
		}
		for i := range delta.Changed {
			newest[delta.Changed[i].VIP] = &delta.Changed[i]
		}
		for _, prefix := range delta.Removed {
			newest[prefix] = nil
		}
	}
	for prefix, state := range newest {
		if state == nil {
			merged.Removed = append(merged.Removed, prefix)
		} else {
			merged.Changed = append(merged.Changed, *state)
		}
	}
	return merged
}
