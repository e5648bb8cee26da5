package serving

import (
	"testing"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A suspected VIP stays ready, with the detail of the probes, also under a new configuration. VIPs
// that are not ready keep their own reason.
func TestSuspectedVIPStaysReady(t *testing.T) {
	const reasonProbes = readinessv1.VipReason_VIP_REASON_PROBES
	c := trenchOf(streamOf("s", vipA, vipB))
	p := startPlaneRig(t, c, targets("s", member("a", "172.16.0.1")))
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.want(vipB, vip.Ready, reasonReady, 1, 1)
	suspects := map[vip.VIP]string{vipB: "two probes", vip.Require("192.0.2.1/32"): "not configured"}
	p.e.Suspect(suspects)
	p.follow(p.evaluate())
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	p.want(vipB, vip.Ready, reasonProbes, 1, 1)
	if detail := p.e.roster.find(vipB, new(int)).verdict.Detail; detail != "two probes" {
		t.Errorf("detail %q", detail)
	}
	p.configure(c)
	p.want(vipB, vip.Ready, reasonProbes, 1, 1)

	p.health("s", "a", healthcheck.NotReady)
	p.want(vipB, vip.NotReady, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, 0, 1)
	p.health("s", "a", healthcheck.Ready)
	p.confirm()
	p.want(vipB, vip.Ready, reasonProbes, 1, 1)
	p.e.Suspect(nil)
	p.follow(p.evaluate())
	p.want(vipB, vip.Ready, reasonReady, 1, 1)
}
