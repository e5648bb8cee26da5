package status

import (
	"testing"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// The status has three static gateways. One sends traffic of a VIP that is not announced, one is
// held down, and one cannot be withdrawn.
func TestFrontendStaticGateways(t *testing.T) {
	s := goodFrontend()
	s.Gateways = append([]*frontendv1.GatewayStatus{
		{
			Name: "gateway-a-6", Address: "fe80::6", State: "Held", Held: true, Protocol: "static", Bfd: "Down",
			Imported: 1, Since: before(0),
		},
		{
			Name: "gateway-a-4", Address: "169.254.100.151", Up: true, State: "Up", Protocol: "static", Bfd: "Up",
			Imported: 1, Since: before(0),
		},
		{
			Name: "gateway-a-5", Address: "169.254.100.152", Up: true, State: "No BFD", Protocol: "static", Imported: 1,
			Warning: "it cannot be withdrawn without BFD", Since: before(0),
		},
	}, s.Gateways...)
	for _, v := range []string{"20.0.0.2/32", "20.0.0.3/32"} {
		s.Vips = append(s.Vips, &frontendv1.VipStatus{
			Vip: v, Advertisement: readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN, Since: before(0),
			Reason:    readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY,
			Readiness: lbNotReady(0), StaticGateways: []string{"gateway-a-4", "gateway-a-5"},
		})
	}
	text, _ := Frontend(s, now)
	wantGolden(t, "frontend-static.golden", text)
}
