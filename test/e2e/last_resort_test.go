package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// waitReason waits until the frontend's status has a reason for a VIP.
func (f *fixture) waitReason(vip, reason string) {
	f.t.Helper()
	want := readinessv1.AdvertisementReason(readinessv1.AdvertisementReason_value["ADVERTISEMENT_REASON_"+reason])
	f.waitFor(func() error {
		for _, v := range f.frontendStatus().GetVips() {
			if v.GetVip() == vip && v.GetReason() != want {
				return fmt.Errorf("%s is %v, want %v", vip, v.GetReason(), want)
			}
		}
		return nil
	})
}

// Row 10 of the gate: a VIP with lastResort that was ready is de-preferred while its targets fail,
// and not withdrawn, however often they do; one without lastResort is withdrawn. A VIP that was
// never ready is not advertised, and neither is a last resort without a load balancer.
func TestLastResort(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.WriteTrench(edited(t, "  - name: stream-a", "  - lastResort: depreferred\n    name: stream-a")))
	f.up(f.target2)
	f.startPod()
	f.wantRoutes(vipB4, vipB6)
	f.waitReason(vipA4, "LB_NOT_READY")
	f.up(f.target1)
	f.wantRoutes(every()...)

	mark := f.mark()
	f.down(f.target2)
	f.down(f.target1)
	f.wantRoutes(vipA4, vipA6)
	f.waitUpdate(mark, vipA4, depreferred)
	f.waitReason(vipA4, "LAST_RESORT")
	f.operate(1, "last resort (stream stream-a: 0 of 1 targets ready", "status")
	for range 3 {
		f.up(f.target1)
		f.waitReason(vipA4, "READY")
		f.down(f.target1)
		f.waitReason(vipA4, "LAST_RESORT")
	}
	f.up(f.target1)
	f.waitReason(vipA4, "READY")
	f.waitUpdate(mark, vipA4, announced)
	for _, update := range f.updates(mark, vipA4) {
		if update.Withdrawn {
			t.Errorf("a last resort was withdrawn: %v", f.updates(mark, vipA4))
		}
	}
	f.down(f.target1)
	f.waitReason(vipA4, "LAST_RESORT")
	f.must(f.pod.LB.Kill())
	f.wantRoutes()
	f.waitReason(vipA4, "LB_LOST")
	// A new load balancer has not lost the targets itself.
	f.must(f.pod.StartLB())
	f.waitReason(vipA4, "LAST_RESORT")
	f.waitUpdate(mark, vipA4, depreferred)
	// A stop withdraws it as any other VIP.
	f.stop(f.pod.LB)
	f.wantRoutes()
}

// The checks of all targets fail, and the applications work: a last resort is forwarded to all of
// them, without a lost request or a broken flow.
func TestLastResortForwards(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	const before = "drainTime:"
	f.must(f.WriteTrench(strings.Replace(dataPlaneTrench(1, 2), before, "lastResort: depreferred\n    "+before, 1)))
	f.start()
	g, err := f.Load(f.ctx, 200, 8, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))

	// One target after the other: the first one was removed from the table before.
	f.must(f.Targets[0].Unhealthy())
	f.waitOutput("1/2", "status")
	// Its flows break when the kernel has the change, which is later than the status.
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		if _, err := g.Take(f.ctx); err != nil {
			return err
		}
		if err := g.WaitAnswered(f.ctx, 100); err != nil {
			return err
		}
		return g.Now().Lost()
	}))
	_, err = g.Take(f.ctx)
	f.must(err)
	f.must(f.Targets[1].Unhealthy())
	f.waitOutput("too few ready, last resort", "status")
	f.must(g.WaitTargets(f.ctx, "target-1", "target-2"))
	f.must(g.WaitAnswered(f.ctx, 200))
	f.must(f.WantVia(f.ctx, 1))
	status, _ := f.pod.Run(f.ctx, "frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if !strings.Contains(status, "2 of 2 VIPs advertised") || !strings.Contains(status, "last resort (") {
		t.Errorf("status of the frontend:\n%s", status)
	}
	result, err := g.Take(f.ctx)
	f.must(err)
	harness.Check(t, result.Lost())

	// The first target that recovers gets all new flows.
	f.must(f.Targets[1].Start())
	f.waitOutput("1/2", "status")
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		if _, err := g.Take(f.ctx); err != nil {
			return err
		}
		if err := g.WaitAnswered(f.ctx, 50); err != nil {
			return err
		}
		if answers := g.Now().ByTarget; answers["target-1"] > 0 {
			return fmt.Errorf("answers of %v", answers)
		}
		return nil
	}))
}
