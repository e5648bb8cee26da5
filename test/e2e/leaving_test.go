package e2e

import (
	"fmt"
	"strings"
	"testing"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// A VIP that is removed from the trench file, or whose stream is, is de-preferred and forwarded
// for the drain time before it is withdrawn; a VIP that returns within the drain time is not
// withdrawn.
func TestVIPsThatLeaveDrain(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	withDrain := func(text, drain string) string {
		return strings.ReplaceAll(text, "    targets:", "    drainTime: "+drain+"\n    targets:")
	}
	full := usualTrench()
	withoutStream := full[:strings.Index(full, "  - name: stream-b")]
	withoutVIP := strings.NewReplacer(fmt.Sprintf("vips: [%s, %q]", vipB4, vipB6), fmt.Sprintf("vips: [%q]", vipB6),
		vipB4+", ", "").Replace(full)
	reloads := func() float64 {
		return metric(t, f.get(lab.LBMetrics, "/metrics"), `vipgate_configuration_reloads_total{result="accepted"}`)
	}

	// The drain time is far longer than the test.
	f.must(f.pod.WriteTrench(withDrain(full, "1h")))
	f.startPod()
	f.wantRoutes(every()...)
	mark := f.mark()
	f.must(f.pod.WriteTrench(withDrain(withoutStream, "1h")))
	f.waitUpdate(mark, vipB4, depreferred)
	for _, v := range f.lbStatus().GetVips() {
		if r := v.GetReadiness(); v.GetVip() == vipB4 && r.GetReason() != readinessv1.VipReason_VIP_REASON_LEAVING {
			t.Errorf("%s is %v", vipB4, r)
		}
	}
	f.must(f.pod.WriteTrench(withDrain(full, "1h")))
	f.waitUpdate(mark, vipB4, announced)
	f.wantUpdates(mark, vipB4, depreferred, announced)

	before := reloads()
	f.must(f.pod.WriteTrench(withDrain(full, "4s")))
	f.waitFor(func() error {
		if n := reloads(); n == before {
			return fmt.Errorf("the lb has reloaded the trench file %v times", n)
		}
		return nil
	})
	for _, step := range []struct {
		name, without string
		leave         []string
	}{
		{"stream removed", withoutStream, []string{vipB4, vipB6}},
		{"VIP removed", withoutVIP, []string{vipB4}},
	} {
		mark := f.mark()
		f.must(f.pod.WriteTrench(withDrain(step.without, "4s")))
		for _, v := range step.leave {
			f.waitUpdate(mark, v, withdrawn)
			f.wantUpdates(mark, v, depreferred, withdrawn)
		}
		f.wantNoUpdates(mark, vipA4, vipA6)
		f.must(f.pod.WriteTrench(withDrain(full, "4s")))
		f.wantRoutes(every()...)
		t.Logf("%s: %v de-preferred, then withdrawn", step.name, step.leave)
	}
}
