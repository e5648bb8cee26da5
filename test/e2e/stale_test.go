package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/lab"
)

// While the writer of the trench file keeps a stale file, only status, events and metrics show it.
func TestStaleTrenchFileIsShown(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	mark, stale := f.mark(), f.pod.TrenchFile()+trench.StaleSuffix
	programs := map[string]struct{ socket, metrics, health, end string }{
		"frontend": {f.pod.FrontendAdmin(), lab.FrontendMetrics, lab.FrontendHealth, "configuration refreshed again"},
		"lb":       {f.pod.LBAdmin(), lab.LBMetrics, lab.LBHealth, "trench file  refreshed"},
	}
	age := func(addr string) float64 {
		return metric(t, f.get(addr, "/metrics"), "vipgate_configuration_stale_seconds")
	}

	f.must(os.WriteFile(stale, []byte("2026-11-20T10:00:01Z API server: connection refused\x1b[2J\n"), 0o640))
	const shown, cause = "not refreshed since 2026-11-20T10:00:01Z (", ` ago): API server: connection refused\x1b[2J`
	f.waitFrontend("TrenchFile", false, shown, cause)
	f.waitLB("TrenchFile", false, shown, cause)
	for program, p := range programs {
		out, _ := f.run(program, "status", "--admin-socket=unix://"+p.socket)
		_, conditions, _ := strings.Cut(out, "\nReady, although these conditions do not hold:\n")
		if !strings.Contains(conditions, "  TrenchFile") || !strings.Contains(conditions, "  "+shown) {
			t.Errorf("%s status does not show it:\n%s", program, out)
		}
		if age(p.metrics) < 1 {
			t.Errorf("%s: the metric is %v", program, age(p.metrics))
		}
		for _, service := range []string{"Readiness", "Liveness", "Configuration"} {
			f.wantHealth(p.health, service, healthv1.HealthCheckResponse_SERVING)
		}
	}

	f.must(os.WriteFile(stale, []byte("broken"), 0o640))
	f.waitFrontend("TrenchFile", false, "may not be refreshed", `"broken" is not a time`)
	f.waitLB("TrenchFile", false, "may not be refreshed", `"broken" is not a time`)
	f.must(f.pod.WriteTrench(strings.Replace(usualTrench(), "trench: trench-a", "trench: trench-b", 1)))
	f.waitFor(func() error {
		if name := f.frontendStatus().GetTrench(); name != "trench-b" {
			return fmt.Errorf("trench %s is in force", name)
		}
		return nil
	})

	f.must(os.Remove(stale))
	f.waitFrontend("TrenchFile", true)
	f.waitLB("TrenchFile", true)
	for program, p := range programs {
		if age(p.metrics) != 0 {
			t.Errorf("%s: the metric is %v", program, age(p.metrics))
		}
		out, _ := f.run(program, "events", "--admin-socket=unix://"+p.socket)
		if strings.Count(out, shown) != 1 || strings.Count(out, p.end) != 1 {
			t.Errorf("%s events does not show one begin and one end:\n%s", program, out)
		}
	}
	f.wantNoUpdates(mark, vipA4, vipA6)
}
