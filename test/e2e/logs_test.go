package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/test/lab"
)

// A normal start logs no warning, and its JSON contains the names of states and reasons.
func TestNormalStartLogsNoWarning(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	svid := func(name, id string) string {
		dir := f.path(name)
		f.must(os.Mkdir(dir, 0o700))
		f.must(f.authority().WriteFiles(dir, f.mint(f.authority(), id)))
		return "--svid-dir=" + dir
	}
	// In a pod neither container waits for the second one.
	f.must(f.pod.StartFrontend("--identity=files", svid("fe-svid", lab.FrontendID), "--log-format=json"))
	f.waitLog(f.pod.Frontend, "starting frontend")
	f.must(f.pod.StartLB("--identity=files", svid("lb-svid", lab.LBID), "--log-format=json"))
	f.wantRoutes(every()...)
	f.wantHealth(lab.LBHealth, "Egress", healthv1.HealthCheckResponse_SERVING)
	for _, addr := range []string{lab.LBHealth, lab.FrontendHealth} {
		f.wantHealth(addr, "Readiness", healthv1.HealthCheckResponse_SERVING)
	}
	changed := 0
	for _, p := range []*lab.Process{f.pod.LB, f.pod.Frontend} {
		for line := range strings.Lines(p.Output()) {
			var entry map[string]any
			if err := json.Unmarshal([]byte(line), &entry); err != nil {
				t.Errorf("%s: no JSON: %s", p.Name, line)
				continue
			}
			if level := fmt.Sprint(entry["level"]); level != "INFO" && level != "DEBUG" {
				t.Errorf("%s: %s", p.Name, line)
			}
			for _, key := range []string{"from", "to", "reason", "state", "family"} {
				if n, number := entry[key].(float64); number {
					t.Errorf("%s: %s is %v, not a word: %s", p.Name, key, n, line)
				}
			}
			if entry["msg"] == "VIP changed" {
				changed++
			}
		}
	}
	if changed < 2*len(every()) {
		t.Errorf("%d changes of VIPs in the logs, want %d", changed, 2*len(every()))
	}
}
