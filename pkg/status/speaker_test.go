package status

import (
	"strings"
	"testing"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
)

// The status does not blame BIRD for a speaker that another program runs.
func TestReasonsNameTheSpeaker(t *testing.T) {
	s := goodFrontend()
	s.Bird = &frontendv1.BirdStatus{External: true, Version: "FRR 8.4.4"}
	for i, reason := range []readinessv1.AdvertisementReason{
		readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_ACCEPTED,
		readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_EXPORTED,
	} {
		s.Vips[i].Advertisement, s.Vips[i].Reason = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN, reason
	}
	text, _ := Frontend(s, now)
	harness.WantText(t, text, "  not accepted by the speaker  ", "  not exported by the speaker  ",
		". The speaker's session with the frontend is down: the speaker has no VIPs",
		". The speaker has the VIP and sends it to no gateway")
	if strings.Contains(text, "BIRD") {
		t.Errorf("the status names BIRD:\n%s", text)
	}
}
