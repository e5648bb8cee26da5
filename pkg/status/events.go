package status

import (
	"fmt"
	"strings"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

// eventTime is RFC 3339 in UTC with milliseconds, as gateways log it.
const eventTime = "2006-01-02T15:04:05.000Z"

// Events renders what `frontend events` shows, in the given order.
func Events(all []*frontendv1.Event) string {
	if len(all) == 0 {
		return "no events\n"
	}
	var l EventLog
	return l.Render(all)
}

// EventLog renders events as they come. Make one with [NewEventLog].
type EventLog struct {
	begun bool  // the header was rendered
	width []int // of the columns so far; they only grow
}

// NewEventLog returns a log whose columns are wide enough for most of what may
// come.
func NewEventLog() *EventLog {
	return &EventLog{width: []int{len(eventTime), 6, 16, len("de-preferred"), len("de-preferred"), 24}}
}

// Render renders further events, the first time under a header.
func (l *EventLog) Render(events []*frontendv1.Event) string {
	if len(events) == 0 {
		return ""
	}
	t := &table{width: l.width}
	if !l.begun {
		l.begun = true
		t.rows = append(t.rows, []string{"TIME", "NUMBER", "VIP OR GATEWAY", "FROM", "TO", "REASON", "LOAD BALANCER", "DETAIL"})
	}
	for _, e := range events {
		at, about, from, to, why := none, e.GetVip(), advertisement(e.GetFrom()), advertisement(e.GetTo()), none
		if e.GetTime() != nil {
			at = e.GetTime().AsTime().UTC().Format(eventTime)
		}
		switch {
		case e.GetVip() != "":
			why = AdvertisementReason(e.GetReason()).Short
		case e.GetGateway() != "":
			about, from, to = e.GetGateway(), "up", "DOWN"
			if e.GetGatewayUp() {
				from, to = "down", "up"
			}
		}
		t.add(at, fmt.Sprint(e.GetSequence()), about, from, to, why, position(e.GetPosition()), e.GetDetail())
	}
	var b strings.Builder
	t.align(&b, "")
	l.width = t.width
	return b.String()
}

// LBEvents renders what `lb events` shows, in the given order.
func LBEvents(all []*lbv1.Event) string {
	if len(all) == 0 {
		return "no events\n"
	}
	t := newTable("TIME", "NUMBER", "OBJECT", "WHAT", "STREAM", "TARGET", "DETAIL")
	for _, e := range all {
		at := none
		if e.GetTime() != nil {
			at = e.GetTime().AsTime().UTC().Format(eventTime)
		}
		t.add(at, fmt.Sprint(e.GetSequence()), e.GetObject(), e.GetWhat(), e.GetStream(), e.GetTarget(), e.GetDetail())
	}
	var b strings.Builder
	t.align(&b, "")
	return b.String()
}
