package status

import (
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
)

// eventTime is RFC 3339 in UTC with milliseconds, the format of gateway logs.
const eventTime = "2006-01-02T15:04:05.000Z"

// EventLog renders events incrementally, in columns that only grow.
type EventLog struct {
	header []string
	row    func(*adminv1.Event) []any
	begun  bool  // the header was rendered
	width  []int // current width of each column
}

// FrontendEventLog returns a log of events of a frontend. Its columns are wide enough for most
// events.
func FrontendEventLog() *EventLog {
	return &EventLog{
		header: []string{"TIME", "NUMBER", "VIP OR GATEWAY", "FROM", "TO", "REASON", "LOAD BALANCER", "DETAIL"},
		row: func(e *adminv1.Event) []any {
			return []any{
				when(e.GetTime()), e.GetSequence(), e.GetObject(), stateWord(e.GetFrom()),
				strings.ReplaceAll(stateWord(e.GetTo()), "down", "DOWN"), explainWord("ADVERTISEMENT_REASON_", e.GetReason()),
				position(e.GetPosition()), e.GetDetail(),
			}
		},
		width: []int{len(eventTime), 6, 16, len("de-preferred"), len("de-preferred"), 24},
	}
}

// stateWord returns the text of an advertisement or of a session's state.
func stateWord(word string) string { return strings.Replace(word, "depreferred", "de-preferred", 1) }

// LBEventLog returns a log of events of a load balancer.
func LBEventLog() *EventLog {
	return &EventLog{
		header: []string{"TIME", "NUMBER", "OBJECT", "WHAT", "STREAM", "TARGET", "DETAIL"},
		row: func(e *adminv1.Event) []any {
			detail := e.GetDetail()
			if reason := explainWord("VIP_REASON_", e.GetReason()); len(e.GetTransitions()) == 0 && reason != "" {
				detail = strings.TrimSuffix(reason+": "+detail, ": ")
			}
			return []any{
				when(e.GetTime()), e.GetSequence(), e.GetObject(), e.GetTo(), e.GetStream(), e.GetTarget(), detail,
			}
		},
		width: []int{len(eventTime), 6, 16, 8, 10, 10},
	}
}

// All renders a complete list of events.
func (l *EventLog) All(events []*adminv1.Event) string {
	if len(events) == 0 {
		return "no events\n"
	}
	l.width = nil
	return l.Render(events)
}

// Render renders further events, the first time under a header.
func (l *EventLog) Render(events []*adminv1.Event) string {
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
