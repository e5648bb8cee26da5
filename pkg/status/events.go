package status

import (
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// eventTime is RFC 3339 in UTC with milliseconds, the format of gateway logs.
const eventTime = "2006-01-02T15:04:05.000Z"

// EventLog renders events incrementally, in columns that only grow.
type EventLog[E any] struct {
	header []string
	row    func(E) []any
	begun  bool  // the header was rendered
	width  []int // current width of each column
}

// FrontendEventLog returns a log of events of a frontend. Its columns are wide enough for most
// events.
func FrontendEventLog() *EventLog[*frontendv1.Event] {
	return &EventLog[*frontendv1.Event]{
		header: []string{"TIME", "NUMBER", "VIP OR GATEWAY", "FROM", "TO", "REASON", "LOAD BALANCER", "DETAIL"},
		row:    frontendEvent,
		width:  []int{len(eventTime), 6, 16, len("de-preferred"), len("de-preferred"), 24},
	}
}

// LBEventLog returns a log of events of a load balancer.
func LBEventLog() *EventLog[*lbv1.Event] {
	return &EventLog[*lbv1.Event]{
		header: []string{"TIME", "NUMBER", "OBJECT", "WHAT", "STREAM", "TARGET", "DETAIL"}, row: lbEvent,
		width: []int{len(eventTime), 6, 16, 8, 10, 10},
	}
}

// All renders a complete list of events.
func (l *EventLog[E]) All(events []E) string {
	if len(events) == 0 {
		return "no events\n"
	}
	l.width = nil
	return l.Render(events)
}

// Render renders further events, the first time under a header.
func (l *EventLog[E]) Render(events []E) string {
	if len(events) == 0 {
		return ""
	}
	t := &table{width: l.width}
	if !l.begun {
		l.begun = true
		t.rows = append(t.rows, l.header)
	}
	for _, e := range events {
		t.add(l.row(e)...)
	}
	var b strings.Builder
	t.align(&b, "")
	l.width = t.width
	return b.String()
}

// when formats the time of an event.
func when(t *timestamppb.Timestamp) string {
	if t == nil {
		return none
	}
	return t.AsTime().UTC().Format(eventTime)
}

func frontendEvent(e *frontendv1.Event) []any {
	about, from, to, why := e.GetVip(), advertisements[e.GetFrom()].event, advertisements[e.GetTo()].event, ""
	switch {
	case e.GetVip() != "":
		why = Explain(e.GetReason()).Short
	case e.GetVipCount() > 0:
		about = plural(int(e.GetVipCount()), "VIP")
		if e.GetReason() != readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_UNSPECIFIED {
			why = Explain(e.GetReason()).Short
		}
	case e.GetGateway() != "":
		about, from, to = e.GetGateway(), "up", "DOWN"
		if e.GetGatewayUp() {
			from, to = "down", "up"
		}
	}
	return []any{when(e.GetTime()), e.GetSequence(), about, from, to, why, position(e.GetPosition()), e.GetDetail()}
}

func lbEvent(e *lbv1.Event) []any {
	return []any{
		when(e.GetTime()), e.GetSequence(), e.GetObject(), e.GetWhat(), e.GetStream(), e.GetTarget(), e.GetDetail(),
	}
}
