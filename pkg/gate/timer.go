package gate

import (
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// timer marks a VIP dirty at a time. A timer is never canceled: when it is obsolete, Evaluate
// reaches the same decision from the same inputs.
type timer struct {
	at  time.Time
	vip vip.VIP
}

// timerHeap is a min-heap for container/heap.
type timerHeap []timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h timerHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)        { *h = append(*h, x.(timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}
