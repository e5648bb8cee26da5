package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// operate runs a command of the frontend and fails unless it ends with a status and its output
// contains a text.
func (f *fixture) operate(status int, contains string, args ...string) {
	f.t.Helper()
	args = append(args, "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if out, got := f.run("frontend", args...); got != status || !strings.Contains(out, contains) {
		f.t.Fatalf("frontend %v ended with %d instead of %d, without %q: %s", args, got, status, contains, out)
	}
}

// withTwoGateways starts a pod whose four gateways are up and have VIPs A.
func (f *fixture) withTwoGateways(args ...string) *lab.Gateway {
	f.t.Helper()
	b := f.second()
	f.must(f.pod.WriteTrench(edited(f.t, lineA6, lineA6+"\n    "+lineB4+"\n    "+lineB6)))
	f.up(f.target1)
	f.startPod(args...)
	f.wantRoutes(vipA4, vipA6)
	f.wantRoutesAt(b, vipA4, vipA6)
	return b
}

// wantUntouched fails if a gateway received an update since a mark of its trace.
func (f *fixture) wantUntouched(g *lab.Gateway, mark int) {
	f.t.Helper()
	trace, err := g.Trace()
	f.must(err)
	if len(trace) > mark {
		f.t.Errorf("the other gateway received %v", trace[mark:])
	}
}

func isDrained(g *frontendv1.GatewayStatus) bool {
	return g.GetUp() && g.GetExport() == "none" && g.GetExported() == 0 && g.GetDrained()
}

func isUndrained(g *frontendv1.GatewayStatus) bool {
	return g.GetUp() && g.GetExport() == "full" && g.GetExported() == 1 && !g.GetDrained()
}

// An operator drains a gateway: its session stays up, its VIPs are de-preferred and then withdrawn,
// and the other gateway keeps them at every instant. The drain survives a restart of the frontend,
// and the last gateway of a family is drained only by force.
func TestGatewayDrain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	b := f.withTwoGateways(visibleDrain, shortSettle)
	trace, err := b.Trace()
	f.must(err)
	mark, other, sessions := f.mark(), len(trace), f.sessions()

	f.operate(0, "gateway-a4", "drain", "--gateway=gateway-a4")
	f.wantRoutes(vipA6)
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	f.waitGateway("gateway-a4", isDrained)
	f.operate(1, "Established, receives no VIP, drained by an operator", "status")
	f.operate(1, "no other ipv4 gateway is up", "drain", "--gateway=gateway-b4")
	f.operate(1, "not in the attractor", "drain", "--gateway=gateway-c4")
	// A repeated drain exports nothing once more.
	f.operate(0, "gateway-a4", "drain", "--gateway=gateway-a4", "--for=1h")
	f.waitGateway("gateway-a4", func(g *frontendv1.GatewayStatus) bool { return g.GetDrainEnds() != nil })
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	f.operate(0, "no gateway is drained", "undrain", "--gateway=gateway-a4")
	f.waitGateway("gateway-a4", isUndrained)
	f.wantRoutes(vipA4, vipA6)
	f.wantUpdates(mark, vipA4, depreferred, withdrawn, announced)
	f.wantNoUpdates(mark, vipA6)
	f.wantUntouched(b, other)
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions restarted: %v, before %v", now, sessions)
	}

	f.operate(0, "gateway-a4", "drain", "--gateway=gateway-a4")
	f.waitGateway("gateway-a4", isDrained)
	f.must(f.pod.Frontend.Kill())
	f.wantRoutes()
	mark = f.mark()
	f.must(f.pod.StartFrontend(visibleDrain, shortSettle))
	f.wantRoutesAt(b, vipA4, vipA6)
	f.wantRoutes(vipA6)
	f.waitGateway("gateway-a4", isDrained)
	f.wantNoUpdates(mark, vipA4)
	f.operate(0, "gateway-b4", "drain", "--gateway=gateway-b4", "--force")
	f.wantRoutesAt(b, vipA6)
	f.waitFor(func() error {
		for _, v := range f.frontendStatus().GetVips() {
			if v.GetVip() == vipA4 && v.GetReason() != readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY {
				return fmt.Errorf("%s without a gateway is %v", vipA4, v.GetReason())
			}
		}
		return nil
	})
	f.operate(0, "still drained gateways: gateway-a4", "undrain", "--gateway=gateway-b4")
	f.wantRoutesAt(b, vipA4, vipA6)
}

// Drains of VIPs survive a restart of the frontend, a drain of all VIPs concerns later VIPs, too,
// and a drain with an end ends by itself, also after a restart.
func TestDrainsSurviveRestart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.WriteTrench(strings.NewReplacer(fmt.Sprintf("vips: [%s, %q]", vipB4, vipB6),
		fmt.Sprintf("vips: [%q]", vipB6), vipB4+", ", "").Replace(usualTrench())))
	f.up(f.target1, f.target2)
	f.startPod(noDrain, shortSettle)
	f.wantRoutes(vipA4, vipA6, vipB6)
	// Without kube, nothing is known about other pods.
	f.operate(1, "it is not known whether another pod advertises "+vipA4, "drain", vipA4)
	f.operate(1, vipB6+"; --force", "drain", "--all")
	f.operate(0, "warning: it is not known whether another pod advertises "+vipA4, "drain", vipA4, "--force")
	f.wantRoutes(vipA6, vipB6)

	restart := func() (mark int) {
		t.Helper()
		f.must(f.pod.Frontend.Kill())
		f.wantRoutes()
		mark = f.mark()
		f.must(f.pod.StartFrontend(noDrain, shortSettle))
		return mark
	}
	mark := restart()
	f.wantRoutes(vipA6, vipB6)
	f.waitFor(func() error {
		for _, c := range f.frontendStatus().GetConditions() {
			if c.GetName() == "Started" && !c.GetServing() {
				return fmt.Errorf("a drained VIP delays the start: %s", c.GetDetail())
			}
		}
		return nil
	})
	f.wantNoUpdates(mark, vipA4)
	f.operate(0, "no VIP is drained", "undrain")
	f.wantRoutes(vipA4, vipA6, vipB6)

	f.operate(0, vipA4, "drain", "--all", "--force")
	f.wantRoutes()
	f.must(f.pod.WriteTrench(usualTrench()))
	f.waitFor(func() error {
		for _, v := range f.frontendStatus().GetVips() {
			if v.GetVip() == vipB4 && v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED {
				return nil
			}
		}
		return fmt.Errorf("%s is not drained", vipB4)
	})
	f.operate(0, "still drained: "+vipA4+" "+vipB4+" "+vipA6, "undrain", vipB6)
	f.wantRoutes(vipB6)
	restart()
	f.wantRoutes(vipB6)

	// A drain with an end leaves older drains, which have none.
	begin := time.Now()
	f.operate(0, vipA4, "drain", "--all", "--force", "--for=6s")
	f.wantRoutes()
	f.operate(1, "drained by an operator", "status")
	mark = restart()
	f.wantRoutes(vipB6)
	if took := time.Since(begin); took < 6*time.Second {
		t.Errorf("the drain ended after %v", took)
	}
	f.waitLog(f.pod.Frontend, "drain by an operator ended by itself")
	f.wantNoUpdates(mark, vipA4, vipA6, vipB4)
	f.operate(0, "no VIP is drained", "undrain")
	f.wantRoutes(every()...)
}

// A drain of a target with an end ends by itself, also after a restart of lb.
func TestTargetDrainEndsByItself(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	admin, begin := "--admin-socket=unix://"+f.pod.LBAdmin(), time.Now()
	if out, status := f.run("lb", "target", "drain", "target-1", "--drain-time=0s", "--for=-1s", admin); status != 2 {
		t.Errorf("a negative end: %d, %s", status, out)
	}
	if out, status := f.run("lb", "target", "drain", "target-1", "--drain-time=0s", "--for=6s", admin); status != 0 {
		t.Fatalf("lb target drain ended with %d: %s", status, out)
	}
	f.wantRoutes()
	if out, _ := f.run("lb", "status", admin); !strings.Contains(out, "by an operator, until ") {
		t.Errorf("status of lb:\n%s", out)
	}
	f.must(f.pod.LB.Kill())
	f.must(f.pod.StartLB())
	f.wantRoutes(vipA4, vipA6)
	if took := time.Since(begin); took < 6*time.Second {
		t.Errorf("the drain ended after %v", took)
	}
}
