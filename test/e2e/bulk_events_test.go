package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// A decision about more than 50 VIPs is one log line and one event of each program, and the event
// is found by each of its VIPs.
func TestEventsOfManyVIPs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var more []string
	for i := range 60 {
		more = append(more, fmt.Sprintf("20.0.9.%d/32", i))
	}
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "["+vipA4, "["+strings.Join(append(more, vipA4), ", "))))
	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(append(more, every()...)...)
	all, one := f.follow(), f.follow("--vip=20.0.9.7/32")
	machine, lb := f.follow("-o", "json"), f.followProgram("lb", f.pod.LBAdmin())
	one.waitFor(&one.out, "20.0.9.7/32", "withdrawn", "announced", "ready")
	f.down(f.target1)
	one.waitFor(&one.out, "20.0.9.7/32", "announced", "withdrawn", "LB says not ready", "connection refused")
	all.waitFor(&all.out, " VIPs ", "announced", "withdrawn", "lb_not_ready", "20.0.0.1/32, 20.0.9.0/32")
	machine.waitFor(&machine.out, `"to":"withdrawn"`, `"vipCount":6`,
		`"firstVips":["20.0.0.1/32","20.0.9.0/32"`)
	lb.waitFor(&lb.out, " VIPs ", "not ready", "too_few_ready")
	for _, events := range []*follower{all, one, machine, lb} {
		events.interrupt()
	}
	for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
		out := p.Output()
		if !strings.Contains(out, `msg="VIPs changed" count=6`) || strings.Contains(out, `msg="VIP changed" vip=20.0.9.`) {
			t.Errorf("%s logs VIPs one by one", p.Name)
		}
	}
}
