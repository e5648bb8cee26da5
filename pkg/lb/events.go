package lb

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

// maxEvents is how many events are kept for `lb events`.
const maxEvents = 1000

// What happened, beside the states of VIPs.
const (
	vipRemoved     = "removed"
	driftSeen      = "drift"
	driftRepaired  = "repaired"
	driftContested = "contested"
	holdBegun      = "held"
	holdEnded      = "resumed"
	problemSeen    = "problem"
	problemSolved  = "solved"
	changesBlocked = "blocked"
)

// event is one event that operators see.
type event struct {
	Sequence             uint64
	Time                 time.Time
	Object, What, Detail string
	Stream, Target       string
}

// events is a ring of the newest events. Its methods may be called from any goroutine and do not
// block.
type events struct {
	mu   sync.Mutex
	ring []event
	last uint64 // sequence number of the newest
}

func (e *events) add(all ...event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, x := range all {
		e.last++
		x.Sequence = e.last
		if x.Time.IsZero() {
			x.Time = time.Now()
		}
		if len(e.ring) < maxEvents {
			e.ring = append(e.ring, x)
		} else {
			e.ring[(e.last-1)%maxEvents] = x
		}
	}
}

// list returns the newest n events after a sequence number, oldest first; n of 0 means all.
func (e *events) list(after uint64, n int) []event {
	e.mu.Lock()
	defer e.mu.Unlock()
	kept := uint64(len(e.ring))
	if n > 0 {
		kept = min(kept, uint64(n))
	}
	var found []event
	for at := max(e.last-kept, min(after, e.last)); at < e.last; at++ {
		found = append(found, e.ring[at%maxEvents])
	}
	return found
}

// ListEvents implements the LBService.
func (a *admin) ListEvents(_ context.Context, r *lbv1.ListEventsRequest) (*lbv1.ListEventsResponse, error) {
	answer := &lbv1.ListEventsResponse{InstanceId: a.process.table.Position().InstanceID}
	for _, e := range a.process.events.list(r.GetAfter(), int(r.GetLimit())) {
		answer.Events = append(answer.Events, &lbv1.Event{
			Time: timestamppb.New(e.Time), Sequence: e.Sequence, Object: e.Object, What: e.What, Detail: e.Detail,
			Stream: e.Stream, Target: e.Target,
		})
	}
	return answer, nil
}
