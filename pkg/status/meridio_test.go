package status

import (
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Meridio's load balancer has no `lb status`.
func TestHintsBesideMeridio(t *testing.T) {
	const (
		neverSeen = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN
		notReady  = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY
		nsp       = "NSP nsp-service-trench-a:7778"
		old       = "loadbalancer.v1.StreamAvailabilityService"
		own       = "vipgate.readiness.v1.ReadinessService"
	)
	for _, c := range []struct {
		name, source, service string
		reason                readinessv1.AdvertisementReason
		own                   bool
	}{
		{"lb not ready", "trench file", own, notReady, true},
		{"lb of a Meridio pod not ready", nsp, own, notReady, true},
		{"lb never seen", "trench file", "", neverSeen, true},
		{"load balancer of Meridio not ready", nsp, old, notReady, false},
		{"load balancer of Meridio, trench file", "trench file", old, notReady, false},
		{"load balancer of Meridio never seen", nsp, "", neverSeen, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			text, _ := Frontend(&frontendv1.Status{
				Gating: true, ConfigurationSource: c.source, LoadBalancer: &frontendv1.LoadBalancerStatus{Service: c.service},
				Vips: []*frontendv1.VipStatus{{Vip: "20.0.0.1/32", Reason: c.reason}},
			}, time.Now())
			if strings.Contains(text, "`lb status`") != c.own || strings.Contains(text, "stateless-lb") == c.own {
				t.Errorf("hints:\n%s", text)
			}
		})
	}
}
