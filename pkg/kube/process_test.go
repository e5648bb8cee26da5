package kube

import (
	"io"
	"slices"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/logs"
	shell "github.com/vipgate/vipgate/pkg/process"
	"github.com/vipgate/vipgate/test/harness"
)

// Every pod of a Trench has the series of the leader from the start, and no router of Meridio 2.
func TestLeaderSeries(t *testing.T) {
	log, level, err := logs.New("text", "info", io.Discard)
	harness.Must(t, err)
	for gateway, want := range map[string]bool{"": true, "gw": false} {
		p, err := newProcess(Options{
			Settings: shell.Settings{Version: "test", Log: log, Level: level},
			Config:   &rest.Config{Host: "http://api"}, Namespace: "ns", Trench: "a", Gateway: gateway,
		})
		harness.Must(t, err)
		families, _ := p.metrics.Registry().Gather() // other collectors need a process that listens
		has := slices.ContainsFunc(families, func(family *dto.MetricFamily) bool {
			return family.GetName() == "vipgate_kube_leader"
		})
		if has != want {
			t.Errorf("gateway %q: a series of the leader: %v", gateway, has)
		}
		p.shell.Close()
	}
}
