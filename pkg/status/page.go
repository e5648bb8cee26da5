package status

import (
	"strings"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
)

// Advertisement returns the word of an advertisement in events.
func Advertisement(vip *frontendv1.VipStatus) string {
	return EventWord(strings.ToLower(strings.TrimPrefix(vip.GetAdvertisement().String(), "ADVERTISEMENT_")))
}

// TargetState returns the state of an address with its drain, and reports whether it is ready.
func TargetState(target *lbv1.TargetStatus, now time.Time) (state string, ready bool) {
	return stateDetail(target, now), targetState(target.GetState()) == targetReady
}

// EventDetail returns the cause of an event with the explanation of its reason.
func EventDetail(event *adminv1.Event) string {
	for _, prefix := range []string{"ADVERTISEMENT_REASON_", "VIP_REASON_"} {
		known := explanations()[prefix+strings.ToUpper(event.GetReason())].Short
		// The detail of many VIPs already contains the reason.
		if known != "" && len(event.GetTransitions()) == 0 {
			return strings.TrimSuffix(known+": "+event.GetDetail(), ": ")
		}
	}
	return event.GetDetail()
}
