package serving

import (
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const reasonLastResort = readinessv1.VipReason_VIP_REASON_LAST_RESORT

// A last resort is forwarded to all targets that fail, and only while none passes; never to drained
// ones. It needs no withdrawal, so nothing is held back.
func TestLastResortServesFailingTargets(t *testing.T) {
	s := streamOf("s", vipA)
	s.LastResort = trench.Depreferred
	p := startPlaneRig(t, trenchOf(s),
		targets("s", member("a", "172.16.0.1"), member("b", "172.16.0.2"), member("c", "172.16.0.3")))
	p.health("s", "a", healthcheck.NotReady)
	p.health("s", "b", healthcheck.Ready)
	p.health("s", "c", healthcheck.Ready)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 2, 3)
	p.wantRole("s", "a", vip.IPv4, plan.Down)
	p.drain("s", "c", -time.Second)
	p.confirm()

	p.health("s", "b", healthcheck.NotReady)
	p.want(vipA, vip.NotReady, reasonLastResort, 0, 3)
	p.wantRole("s", "a", vip.IPv4, plan.Serving)
	p.wantRole("s", "b", vip.IPv4, plan.Serving)
	p.wantRole("s", "c", vip.IPv4, plan.Down)
	p.confirm()
	p.want(vipA, vip.NotReady, reasonLastResort, 0, 3)
	// A target that has just been added is not judged yet: the last resort stays.
	p.health("s", "a", healthcheck.Starting)
	p.want(vipA, vip.NotReady, reasonLastResort, 0, 3)

	p.health("s", "b", healthcheck.Ready)
	p.health("s", "a", healthcheck.NotReady)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 3)
	p.wantRole("s", "a", vip.IPv4, plan.Down)
	// Without a target that may fail, nothing is forwarded.
	p.drain("s", "a", -time.Second)
	p.drain("s", "b", -time.Second)
	p.confirm()
	p.want(vipA, vip.NotReady, reasonTooFew, 0, 3)
}

// Targets that are ready serve a last resort alone, and without a kernel that forwards it is none.
func TestLastResortBelowMinReady(t *testing.T) {
	s := streamOf("s", vipA)
	s.LastResort, s.MinReady = trench.Depreferred, 2
	p := startPlaneRig(t, trenchOf(s), targets("s", member("a", "172.16.0.1"), member("b", "172.16.0.2")))
	p.health("s", "a", healthcheck.Ready)
	p.health("s", "b", healthcheck.NotReady)
	p.want(vipA, vip.NotReady, reasonTooFew, 0, 2)
	p.confirm()
	p.want(vipA, vip.NotReady, reasonLastResort, 1, 2)
	p.wantRole("s", "b", vip.IPv4, plan.Down)
	state := applied(plan.State{}, p.last())
	delete(state.VIPs, vipA)
	p.confirmState(state)
	p.want(vipA, vip.NotReady, reasonTooFew, 1, 2)
}
