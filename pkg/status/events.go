package status

import (
	"cmp"
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

// FrontendEventLog returns a log of a frontend's events. Its columns are wide enough for most.
func FrontendEventLog() *EventLog {
	return &EventLog{
		header: []string{"TIME", "NUMBER", "VIP OR GATEWAY", "FROM", "TO", "REASON", "LOAD BALANCER", "DETAIL"},
		row: func(event *adminv1.Event) []any {
			return []any{
				when(event.GetTime()), event.GetSequence(), event.GetObject(), EventWord(event.GetFrom()),
				strings.ReplaceAll(EventWord(event.GetTo()), "down", "DOWN"), explainWord("ADVERTISEMENT_REASON_",
					event.GetReason()),
				position(event.GetPosition()), withCaller(event, event.GetDetail()),
			}
		},
		width: []int{len(eventTime), 6, 16, len("de-preferred"), len("de-preferred"), 24},
	}
}

// withCaller adds the caller of an order to the detail of its event.
func withCaller(event *adminv1.Event, detail string) string {
	if event.GetBy() == "" {
		return detail
	}
	return strings.TrimSpace(detail + " (" + event.GetBy() + ")")
}

// EventWord returns the text of an advertisement or of a session's state.
func EventWord(word string) string { return strings.Replace(word, "depreferred", "de-preferred", 1) }

// LBEventLog returns a log of events of a load balancer.
func LBEventLog() *EventLog {
	return &EventLog{
		header: []string{"TIME", "NUMBER", "OBJECT", "WHAT", "STREAM", "TARGET", "DETAIL"},
		row: func(event *adminv1.Event) []any {
			// The table has no column for the reason. The detail of many VIPs already contains it.
			detail := event.GetDetail()
			if reason := explainWord("VIP_REASON_", event.GetReason()); len(event.GetTransitions()) == 0 && reason != "" {
				detail = strings.TrimSuffix(reason+": "+detail, ": ")
			}
			return []any{
				when(event.GetTime()), event.GetSequence(), event.GetObject(), event.GetTo(), event.GetStream(),
				event.GetTarget(), withCaller(event, detail),
			}
		},
		width: []int{len(eventTime), 6, 16, 8, 10, 10},
	}
}

// All renders a complete list of events.
func (log *EventLog) All(events []*adminv1.Event) string {
	if len(events) == 0 {
		return "no events\n"
	}
	log.width = nil // all rows are known, so the columns fit them exactly
	return log.Render(events)
}

// Render renders further events, the first time under a header.
func (log *EventLog) Render(events []*adminv1.Event) string {
	if len(events) == 0 {
		return ""
	}
	rows := &table{width: log.width}
	if !log.begun {
		// A followed log has one header, whatever the number of calls.
		log.begun = true
		rows.rows = append(rows.rows, log.header)
	}
	for _, event := range events {
		rows.add(log.row(event)...)
	}
	var out strings.Builder
	rows.align(&out, "")
	// Later rows start with these widths, so that the columns stay aligned.
	log.width = rows.width
	return out.String()
}

func when(stamp *timestamppb.Timestamp) string {
	if stamp == nil {
		return none
	}
	return stamp.AsTime().UTC().Format(eventTime)
}

// PodEventLog renders events of several pods, in columns that only grow.
type PodEventLog struct{ rows table }

// Row renders an event of a program, or a note without an event.
func (log *PodEventLog) Row(pod, program string, event *adminv1.Event, note string) string {
	log.rows.rows = nil
	if log.rows.width == nil {
		log.rows.rows = [][]string{{"TIME", "POD", "PROGRAM", "OBJECT", "FROM", "TO", "DETAIL"}}
		log.rows.width = []int{len(eventTime), 0, len("frontend"), 16, len("de-preferred"), len("de-preferred")}
	}
	detail := event.GetDetail()
	for _, prefix := range []string{"ADVERTISEMENT_REASON_", "VIP_REASON_"} {
		reason := event.GetReason()
		if known := explanations()[prefix+strings.ToUpper(reason)].Short; known != "" && len(event.GetTransitions()) == 0 {
			detail = strings.TrimSuffix(known+": "+detail, ": ")
			break
		}
	}
	object := event.GetObject()
	if target := event.GetTarget(); target != "" && target != object {
		object = strings.TrimPrefix(target+" "+object, " ")
	}
	log.rows.add(when(event.GetTime()), pod, program, object, EventWord(event.GetFrom()), EventWord(event.GetTo()),
		cmp.Or(note, detail))
	var out strings.Builder
	log.rows.align(&out, "")
	return out.String()
}
