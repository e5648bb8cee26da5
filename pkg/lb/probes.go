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

// maxSuspectEvents bounds the events of one change; more VIPs share one.
const maxSuspectEvents = 50

// suspectEvents returns the events of VIPs that probes begin or cease to find dead.
func suspectEvents(before, after map[vip.VIP]string) (events []*adminv1.Event) {
	for _, change := range []struct {
		from, to map[vip.VIP]string
		word     string
	}{{before, after, "dead, by probes"}, {after, before, "no longer dead, by probes"}} {
		var changed []vip.VIP
		for v := range change.to {
			if change.from[v] == "" {
				changed = append(changed, v)
			}
		}
		slices.SortFunc(changed, vip.Compare)
		if len(changed) > maxSuspectEvents {
			events = append(events, &adminv1.Event{
				Object: fmt.Sprintf("%d VIPs", len(changed)), To: change.word, VipCount: uint32(len(changed)),
				Detail: fmt.Sprintf("%s: %s%s", changed[0], change.to[changed[0]], andMore(len(changed)-1)),
			})
			continue
		}
		for _, v := range changed {
			events = append(events, &adminv1.Event{Object: v.String(), To: change.word, Detail: change.to[v]})
		}
	}
	return events
}
