package publication

import (
	"fmt"
	"testing"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/growth"
)

// Services of one VIP each, and a Service of all VIPs, of which the pods advertise every second.
func TestGrowth(t *testing.T) {
	for name, services := range map[string]func(n int) int{
		"Services": func(n int) int { return n }, "VIPs": func(int) int { return 1 },
	} {
		growth.Check(t, name, 100, 500, func(t *testing.T, n int) func() {
			status := &frontendv1.Status{}
			in := input(trench(), service())
			in.Objects.Services = nil
			for i := range services(n) {
				object, verdict := service(), accepted()
				object.Name = fmt.Sprint("web-", i)
				verdict.Object.Name = object.Name
				in.Objects.Services, in.Result.Services = append(in.Objects.Services, object), append(in.Result.Services, verdict)
			}
			for i := range n {
				state, reason := announced, ready
				if i%2 > 0 {
					state, reason = withdrawn, notReady
				}
				status.Vips = append(status.Vips, vipStatus(growth.VIP(i), state, reason,
					readinessv1.VipReason_VIP_REASON_NO_TARGETS))
				verdict := &in.Result.Services[i%services(n)]
				verdict.VIPs = append(verdict.VIPs, growth.VIP(i))
			}
			in = withReports(with2(in, status))
			return func() {
				reportOf(status)
				if got := len(evaluate(in, published{}, at)); got != services(n)+1 {
					t.Fatalf("%d objects", got)
				}
			}
		})
	}
}
