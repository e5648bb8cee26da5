package status

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/harness"
)

func TestPods(t *testing.T) {
	now := time.Now()
	good := Pod{Name: "pod-1", Frontend: chainFrontend(now), LB: chainLB(now)}
	text, complete := Pods([]Pod{good}, now)
	if !complete {
		t.Errorf("a good pod is not good:\n%s", text)
	}
	for name, c := range map[string]struct {
		change func(*Pod)
		want   string
	}{
		"no answer": {
			func(p *Pod) { p.Frontend, p.Problems = nil, []string{"frontend does not answer: gone"} },
			"NO pod-2 - - 1/1 frontend does not answer: gone",
		},
		"gateway": {
			func(p *Pod) {
				p.Frontend.Gateways[0].Up, p.Frontend.Gateways[0].LastError = false, "Hold timer expired"
			},
			"gateway " + good.Frontend.GetGateways()[0].GetName() + " is DOWN: Hold timer expired",
		},
		"withdrawn": {
			func(p *Pod) {
				p.Frontend.Vips[0].Advertisement = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
				p.Frontend.Vips[0].Reason = readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY
			},
			"advertised by 1 of 2 answering pods; pod-2: ",
		},
		"trench file": {
			func(p *Pod) { p.LB.ConfigurationError = "line 3: unknown field" },
			"lb: the trench file on disk is not in force: line 3: unknown field",
		},
		"data plane": {
			func(p *Pod) {
				p.LB.DataPlane = &lbv1.DataPlaneStatus{Problems: []*adminv1.Problem{
					{Object: "interface net1", Detail: "is down", Remedy: "set it up"},
				}}
			},
			"interface net1: is down; set it up",
		},
		"control characters": {
			func(p *Pod) { p.Problems = []string{"frontend:\x1b[2J gone"} }, "frontend: [2J gone",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bad := Pod{Name: "pod-2", Frontend: chainFrontend(now), LB: chainLB(now)}
			c.change(&bad)
			text, complete := Pods([]Pod{good, bad}, now)
			line := strings.Join(strings.Fields(text), " ")
			if complete || !strings.Contains(line, "ok pod-1") || !strings.Contains(line, "NO pod-2") ||
				!strings.Contains(line, c.want) || !strings.Contains(line, "1 of 2 pods good") {
				t.Errorf("complete=%v, want %q:\n%s", complete, c.want, text)
			}
		})
	}
}

func TestPodsJSON(t *testing.T) {
	text, err := PodsJSON([]Pod{
		{Name: "a", Problems: []string{"gone"}}, {Name: "b", Frontend: &frontendv1.Status{Trench: "t"}},
	})
	harness.Must(t, err)
	var got []struct {
		Name     string
		Problems []string
		Frontend *struct{ Trench string }
	}
	harness.Must(t, json.Unmarshal([]byte(text), &got))
	if len(got) != 2 || got[0].Frontend != nil || got[0].Problems[0] != "gone" || got[1].Frontend.Trench != "t" {
		t.Errorf("got %s", text)
	}
}
