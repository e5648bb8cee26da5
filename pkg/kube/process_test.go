package kube

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
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

// A write that fails after its first file counts as a failure only.
func TestFailedWrite(t *testing.T) {
	log := &harness.Log{}
	_, level, err := logs.New("text", "info", log)
	harness.Must(t, err)
	p, err := newProcess(Options{
		Settings: shell.Settings{Version: "test", Log: log.Logger(), Level: level},
		Config:   &rest.Config{Host: "http://api"}, Namespace: "ns", Trench: "a", TrenchFile: "/nowhere/trench.yaml",
	})
	harness.Must(t, err)
	defer p.shell.Close()
	p.translated(cluster.Snapshot{}, translation.Result{}, outcome{wrote: true, err: errors.New("disk full")})
	if p.counts.writes != 0 || p.counts.failures != 1 || strings.Contains(log.String(), "trench file written") {
		t.Errorf("%+v\n%s", p.counts, log.String())
	}
	p.translated(cluster.Snapshot{}, translation.Result{}, outcome{wrote: true})
	if p.counts.writes != 1 || p.counts.failures != 1 || !strings.Contains(log.String(), "trench file written") {
		t.Errorf("%+v\n%s", p.counts, log.String())
	}
}
