package frontend

import (
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxEvents is how many events are kept for `frontend events`.
const maxEvents = 1000

// event is one transition of a VIP, or, without a VIP, something worth knowing
// about the frontend as a whole.
type event struct {
	Sequence uint64
	Time     time.Time
	VIP      vip.VIP
	From, To gate.Decision
	Instance string
	Revision uint64
	Detail   string
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

// list returns the events after a sequence number that match, oldest first.
func (e *events) list(after uint64, match func(event) bool) []event {
	var found []event
	first := uint64(1)
	if e.last > maxEvents {
		first = e.last - maxEvents + 1
	}
	for n := max(first, after+1); n <= e.last; n++ {
		if x := e.ring[int((n-1)%maxEvents)]; match(x) {
			found = append(found, x)
		}
	}
	return found
}
