package status

import (
	"fmt"
	"strings"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
)

// eventTime is RFC 3339 in UTC with milliseconds, as gateways log it.
const eventTime = "2006-01-02T15:04:05.000Z"

// Events renders what `frontend events` shows, in the given order.
func Events(all []*frontendv1.Event) string {
	if len(all) == 0 {
		return "no events\n"
	}
	t := newTable("TIME", "NUMBER", "VIP", "FROM", "TO", "REASON", "LOAD BALANCER", "DETAIL")
	for _, e := range all {
		at := none
		if e.GetTime() != nil {
			at = e.GetTime().AsTime().UTC().Format(eventTime)
		}
		why := none
		if e.GetVip() != "" {
			why = AdvertisementReason(e.GetReason()).Short
		}
		t.add(at, fmt.Sprint(e.GetSequence()), e.GetVip(), advertisement(e.GetFrom()), advertisement(e.GetTo()), why, position(e.GetPosition()), e.GetDetail())
	}
	var b strings.Builder
	t.align(&b, "")
	return b.String()
}
