package status

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
)

func TestKube(t *testing.T) {
	now := time.Unix(2_000_000_000, 0)
	since := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }
	full := func() *kubev1.Status {
		return &kubev1.Status{
			Version: "v1", Namespace: "trench-a", Trench: "trench-a", Pod: "lb-1", Leader: "lb-2",
			SyncedSince: since(time.Hour), File: &kubev1.TrenchFile{Path: "/t.yaml", Written: since(time.Minute), Writes: 2},
			Verdict:  &kubev1.Verdict{Object: "Trench trench-a/trench-a", Accepted: true, Reason: "Valid"},
			Services: []*kubev1.ServiceVerdict{{Verdict: &kubev1.Verdict{Object: "Service trench-a/web", Accepted: true}}},
			Caches:   []*kubev1.Cache{{What: "Pods in namespace trench-a", Synced: true, Objects: 3}},
		}
	}
	for _, tt := range []struct {
		name   string
		change func(*kubev1.Status)
		good   bool
		want   string
	}{
		{"all is well", func(*kubev1.Status) {}, true, "/t.yaml, written 1m0s ago, 2 writes"},
		{"stale", func(s *kubev1.Status) {
			s.StaleSince, s.StaleCause = since(time.Minute), "gone"
		}, false, "STALE for 1m0s: gone"},
		{"not synced", func(s *kubev1.Status) { s.SyncedSince, s.Verdict = nil, nil }, false, "NOT SYNCED"},
		{"Trench refused", func(s *kubev1.Status) {
			s.Verdict = &kubev1.Verdict{Reason: "Invalid", Message: "no VIPs"}
		}, false, "REFUSED (Invalid): no VIPs"},
		{"Service refused", func(s *kubev1.Status) {
			s.Services[0].Verdict = &kubev1.Verdict{Object: "Service trench-a/web", Reason: "NoVIP", Message: "add one"}
		}, false, "NoVIP: add one"},
		{"Pod refused", func(s *kubev1.Status) {
			s.Services[0].Verdict.Problems = []*kubev1.Problem{{Object: "Pod trench-a/web-1", Reason: "NoAddress"}}
		}, false, "Pod trench-a/web-1: NoAddress"},
		{"many Pods refused", func(s *kubev1.Status) {
			for range maxItems + 5 {
				s.Services[0].Verdict.Problems = append(s.Services[0].Verdict.Problems, &kubev1.Problem{Reason: "NoAddress"})
			}
		}, false, "and 5 more: --output=json has them all"},
		{"warning", func(s *kubev1.Status) {
			s.Services[0].Verdict.Problems = []*kubev1.Problem{{Object: "Service ns/web", Reason: "TCPCheck", Warning: true}}
		}, true, "Without effect on the traffic:\n  Service ns/web: TCPCheck"},
		{"watch fails", func(s *kubev1.Status) {
			s.Caches[0].FailingSince, s.Caches[0].Error = since(time.Second), "Forbidden"
		}, true, "synced, failing for 1s: Forbidden"},
		{"no leader", func(s *kubev1.Status) { s.Leader = "" }, false, "NONE: status and Events are not written; " +
			"see the Lease vipgate-trench-a"},
		{"no leader of a Gateway", func(s *kubev1.Status) {
			s.Leader, s.Verdict.Object = "", "Gateway trench-a/trench-a"
		}, true, "/t.yaml"},
		{"published", func(s *kubev1.Status) {
			s.Publication = &kubev1.Publication{Complete: true, Reason: "Published", Message: "192.0.2.1 for Services"}
		}, true, "192.0.2.1 for Services"},
		{"not published", func(s *kubev1.Status) {
			s.Publication = &kubev1.Publication{Reason: "SourceMissing", Message: "Service lb does not exist"}
		}, false, "INCOMPLETE (SourceMissing): Service lb does not exist"},
		{"not written", func(s *kubev1.Status) { s.File.Error = "disk full" }, false, "NOT WRITTEN: disk full"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := full()
			tt.change(s)
			if text, good := Kube(s, now); good != tt.good || !strings.Contains(text, tt.want) {
				t.Errorf("good %v, want %v with %q:\n%s", good, tt.good, tt.want, text)
			}
		})
	}
}

// A warning breaks no step of the explanation of a Service.
func TestWarningOfService(t *testing.T) {
	for _, warning := range []bool{true, false} {
		problem := &kubev1.Problem{Object: "Service ns/web", Reason: "TCPCheck", Message: "write a check", Warning: warning}
		accepted := &kubev1.Verdict{Object: "Trench ns/a", Accepted: true}
		chain := &Chain{Service: "svc/ns/web"}
		chain.KubeSteps(&kubev1.Status{
			SyncedSince: timestamppb.Now(), Leader: "lb-1", File: &kubev1.TrenchFile{Path: "/t.yaml"}, Verdict: accepted,
			Services: []*kubev1.ServiceVerdict{{Targets: 1, Verdict: &kubev1.Verdict{
				Object: "Service ns/web", Accepted: true, Problems: []*kubev1.Problem{problem},
			}}},
		}, time.Now())
		sign := map[bool]string{true: "!!", false: "NO"}[warning] + "  Service"
		if text := chain.Text(); chain.Good() != warning || !strings.Contains(text, sign) {
			t.Errorf("warning %v: good %v\n%s", warning, chain.Good(), text)
		}
	}
}
