package frontend

import (
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/gate"
)

func advertisementProto(a gate.Advertisement) readinessv1.Advertisement {
	switch a {
	case gate.Announced:
		return readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	case gate.Depreferred:
		return readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED
	default:
		return readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	}
}

// reasonProto relies on the order of the proto's values, which is that of the gate's table; a test
// compares the names.
func reasonProto(r gate.Reason) readinessv1.AdvertisementReason {
	return readinessv1.AdvertisementReason(r) + 1
}
