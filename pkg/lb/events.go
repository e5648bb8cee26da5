package lb

import (
	"context"
	"slices"
	"sync"

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

// events keeps the newest events. Its methods may be called from any goroutine and do not block.
type events struct {
	mu   sync.Mutex
	list []*lbv1.Event
	last uint64 // sequence number of the newest
}

func (e *events) add(all ...*lbv1.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, x := range all {
		e.last++
		x.Sequence, x.Time = e.last, timestamppb.Now()
	}
	e.list = append(e.list, all...)
	e.list = e.list[max(0, len(e.list)-maxEvents):]
}

// newest returns the newest n events after a sequence number, oldest first; n of 0 means all.
func (e *events) newest(after uint64, n int) []*lbv1.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	found := slices.Clone(e.list)
	found = slices.DeleteFunc(found, func(x *lbv1.Event) bool { return x.Sequence <= after })
	if n > 0 {
		found = found[max(0, len(found)-n):]
	}
	return found
}

// ListEvents implements the LBService.
func (a *admin) ListEvents(_ context.Context, r *lbv1.ListEventsRequest) (*lbv1.ListEventsResponse, error) {
	return &lbv1.ListEventsResponse{
		InstanceId: a.process.table.Position().InstanceID,
		Events:     a.process.events.newest(r.GetAfter(), int(r.GetLimit())),
	}, nil
}
