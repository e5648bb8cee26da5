package metrics

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Targets is the state of the targets and their sources.
type Targets struct {
	// States counts addresses of targets by state, such as "not ready". States without targets are
	// present with 0.
	States  map[string]int
	Sources []Source
	// Refusals counts rejected calls of the registry.
	Refusals uint64
	Suspect  bool
}

// Source is one source of targets.
type Source struct {
	Name              string
	Live              bool
	Targets, Problems int
}

// targets collects the metrics of targets at a scrape.
type targets struct {
	states, live, count, problems, refusals, suspect *prometheus.Desc
	read                                             atomic.Pointer[func() Targets]
}

// Describe implements prometheus.Collector.
func (t *targets) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{t.states, t.live, t.count, t.problems, t.refusals, t.suspect} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (t *targets) Collect(ch chan<- prometheus.Metric) {
	read := t.read.Load()
	if read == nil {
		return
	}
	now := (*read)()
	for state, n := range now.States {
		ch <- gauge(t.states, float64(n), label(state))
	}
	for _, s := range now.Sources {
		ch <- gauge(t.live, boolValue(s.Live), s.Name)
		ch <- gauge(t.count, float64(s.Targets), s.Name)
		ch <- gauge(t.problems, float64(s.Problems), s.Name)
	}
	ch <- counter(t.refusals, now.Refusals)
	ch <- gauge(t.suspect, boolValue(now.Suspect))
}
