package frontend

import (
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxEvents is how many events are kept for `frontend events`.
const maxEvents = 1000

// maxEventsPerMessage bounds a message of WatchEvents.
const maxEventsPerMessage = 256

// event is a transition of a VIP or of a gateway or, without either, an event of the frontend
// itself.
type event struct {
	Sequence  uint64
	Time      time.Time
	VIP       vip.VIP
	From, To  gate.Decision
	Position  readiness.Position // of the load balancer
	Detail    string
	Gateway   string
	GatewayUp bool
}

// events is a ring of the newest events.
type events struct {
	ring []event
	last uint64 // sequence number of the newest
}

func (e *events) add(x event) {
	e.last++
	x.Sequence = e.last
	if len(e.ring) < maxEvents {
		e.ring = append(e.ring, x)
		return
	}
	e.ring[int((e.last-1)%maxEvents)] = x
}

// oldest is the sequence number of the oldest event that is kept.
func (e *events) oldest() uint64 {
	if e.last > maxEvents {
		return e.last - maxEvents + 1
	}
	return 1
}

func (e *events) at(sequence uint64) event { return e.ring[int((sequence-1)%maxEvents)] }

// tail returns the sequence number before the newest n events that match, or after if there are
// fewer or n is 0.
func (e *events) tail(after uint64, n int, match func(event) bool) uint64 {
	for at := e.last; at > after && at >= e.oldest(); at-- {
		if match(e.at(at)) {
			if n--; n == 0 {
				return at - 1
			}
		}
	}
	return after
}

// page returns at most n events after a sequence number that match, oldest first, the sequence
// number up to which they are complete, and how many events were overwritten.
func (e *events) page(after uint64, n int, match func(event) bool) (found []event, upTo, lost uint64) {
	if first := e.oldest(); after+1 < first {
		lost = first - 1 - after
		after = first - 1
	}
	for upTo = after; upTo < e.last && len(found) < n; upTo++ {
		if x := e.at(upTo + 1); match(x) {
			found = append(found, x)
		}
	}
	return found, upTo, lost
}
