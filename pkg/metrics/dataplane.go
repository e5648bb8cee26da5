package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// DataPlane is the state of the data plane at a scrape.
type DataPlane struct {
	// Targets counts addresses of targets by state.
	Targets               map[string]int
	Drift, Problems, Held int
	// Failures and Repairs count since the start.
	Failures, Repairs uint64
}

// dataPlane collects the metrics of the data plane at a scrape.
type dataPlane struct {
	targets, drift, problems, held, failures, repairs *prometheus.Desc
	read                                              func() DataPlane
}

// DataPlane adds the metrics of a data plane; each scrape calls read. The returned function
// observes the duration of a change in the kernel and does not block.
func (l *LB) DataPlane(read func() DataPlane) func(time.Duration) {
	d := describe()
	// Goal: 5 ms for one change among 1 000 targets; a large table takes 0.5 s.
	apply := d.histogram(LBDataPlaneApply, []float64{
		500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1, 2, 5,
	})
	l.registry.MustRegister(apply, &dataPlane{
		targets: d.desc(LBDataPlaneTargets, Gauge), drift: d.desc(LBDataPlaneDrift, Gauge),
		problems: d.desc(LBDataPlaneProblems, Gauge),
		held:     d.desc(LBDataPlaneHeld, Gauge), failures: d.desc(LBDataPlaneFailures, Counter),
		repairs: d.desc(LBDataPlaneRepairs, Counter), read: read,
	})
	return func(t time.Duration) { apply.Observe(t.Seconds()) }
}

// Describe implements prometheus.Collector.
func (p *dataPlane) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{p.targets, p.drift, p.problems, p.held, p.failures, p.repairs} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (p *dataPlane) Collect(ch chan<- prometheus.Metric) {
	now := p.read()
	for state, n := range now.Targets {
		ch <- gauge(p.targets, float64(n), label(state))
	}
	ch <- gauge(p.drift, float64(now.Drift))
	ch <- gauge(p.problems, float64(now.Problems))
	ch <- gauge(p.held, float64(now.Held))
	ch <- counter(p.failures, now.Failures)
	ch <- counter(p.repairs, now.Repairs)
}
