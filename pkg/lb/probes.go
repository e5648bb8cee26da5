package lb

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/pkg/vip"
)

// probeChanged records that the lease of a probe begins or ends. It does not block.
func (p *process) probeChanged(probe spiffeid.ID, live bool) {
	event := &adminv1.Event{Object: "probe " + probe.String(), To: "lost", Detail: "its lease ended"}
	if live {
		event.To, event.Detail = "live", ""
	}
	p.decisions.journal.Add(event)
}

// probeProblem returns the first VIP that probes find dead, or why no verdict can count, or "".
func probeProblem(suspects map[vip.VIP]string, problem string) string {
	if len(suspects) == 0 {
		return problem
	}
	first := slices.MinFunc(slices.Collect(maps.Keys(suspects)), vip.Compare)
	return fmt.Sprintf("%s: %s%s", first, suspects[first], andMore(len(suspects)-1))
}

// probeMetrics returns the probes at the moment of a scrape.
func (p *process) probeMetrics() metrics.Probes {
	m := metrics.Probes{Suspects: len(p.probes.Suspects().Load()), Refused: p.probes.Refused()}
	for _, probe := range p.probes.Status() {
		m.Probes = append(m.Probes, metrics.ProbeLease{
			ID: probe.ID.String(), Live: probe.Live, Here: probe.Here, Dead: probe.Dead,
		})
	}
	return m
}
