package metrics

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// LB holds the metrics of a load balancer. Its methods are safe for concurrent use and do not
// block. Create one with [NewLB].
type LB struct {
	*process
	*vips
	connected  *prometheus.GaugeVec
	advertised *prometheus.GaugeVec
}

// NewLB returns the metrics of a load balancer in a new registry, including the collectors of the
// Go runtime and of the process.
func NewLB(version string) *LB {
	lb := &LB{
		process:    newProcess("lb", version),
		vips:       newVIPs(lbVIPState, lbVIPReason, lbVIPs, lbVIPTransitions, "not_ready", "draining", "ready"),
		connected:  lbFrontendConnected.gauges(),
		advertised: lbFrontendVIPs.gauges(),
	}
	lb.vips.targets = true
	lb.registry.MustRegister(scrape(lb.vips.collect), lb.transitions, lb.connected, lb.advertised)
	return lb
}

// Frontend sets whether a reporting frontend is connected, and how many VIPs it advertises.
func (lb *LB) Frontend(connected bool, advertised int) {
	lb.connected.WithLabelValues().Set(boolValue(connected))
	lb.advertised.WithLabelValues().Set(float64(advertised))
}

// Targets is the state of the targets and their sources.
type Targets struct {
	// States counts addresses of targets by state, such as "not ready". States without targets have 0.
	States  map[string]int
	Sources []Source
	// Rejections counts rejected calls of the registry.
	Rejections uint64
}

// Source is one source of targets.
type Source struct {
	Name              string
	Live              bool
	Targets, Problems int
}

// Targets adds the metrics of targets and their sources; each scrape calls read.
func (lb *LB) Targets(read func() Targets) {
	lb.registry.MustRegister(scrape(func(send send) {
		t := read()
		for state, n := range t.States {
			send(lbTargets, float64(n), label(state))
		}
		for _, source := range t.Sources {
			send(lbSourceLive, boolValue(source.Live), source.Name)
			send(lbSourceTargets, float64(source.Targets), source.Name)
			send(lbSourceProblems, float64(source.Problems), source.Name)
		}
		send(lbRegistryRejections, float64(t.Rejections))
	}))
}

// Probes is the state of the probes that report verdicts, at a scrape.
type Probes struct {
	Probes   []ProbeLease
	Suspects int    // VIPs that they find dead through this pod
	Refused  uint64 // reports since the start
}

// ProbeLease is one probe, with its paths through this pod.
type ProbeLease struct {
	ID         string
	Live       bool
	Here, Dead int
}

// Probes adds the metrics of probes; each scrape calls read.
func (lb *LB) Probes(read func() Probes) {
	lb.registry.MustRegister(scrape(func(send send) {
		state := read()
		for _, probe := range state.Probes {
			send(lbProbeLive, boolValue(probe.Live), probe.ID)
			send(lbProbePaths, float64(probe.Here-probe.Dead), probe.ID, "reachable")
			send(lbProbePaths, float64(probe.Dead), probe.ID, "dead")
		}
		send(lbProbeSuspects, float64(state.Suspects))
		send(lbProbeRejections, float64(state.Refused))
	}))
}

// DataPlane is the state of the data plane at a scrape.
type DataPlane struct {
	// Targets counts addresses of targets by state.
	Targets               map[string]int
	Drift, Problems, Held int
	// Failures and Repairs count since the start.
	Failures, Repairs uint64
	// Unmatched counts dropped packets by stream, for streams with a match.
	Unmatched map[string]uint64
	// FastPath counts interfaces by whether the fast path is attached; nil without a fast path.
	FastPath map[bool]int
	// Moved counts packets of flows of other pods by outcome.
	Moved map[string]uint64
}

// DataPlane adds the metrics of a data plane; each scrape calls read. The returned function
// observes the duration of a change in the kernel and does not block.
func (lb *LB) DataPlane(read func() DataPlane) func(time.Duration) {
	// Goal: 5 ms for one change among 1 000 targets; a large table takes 0.5 s.
	apply := lbDataPlaneApply.histogram(
		500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1, 2, 5)
	lb.registry.MustRegister(apply, scrape(func(send send) {
		plane := read()
		sendAll(send, lbDataPlaneTargets, plane.Targets)
		send(lbDataPlaneDrift, float64(plane.Drift))
		send(lbDataPlaneProblems, float64(plane.Problems))
		send(lbDataPlaneHeld, float64(plane.Held))
		send(lbDataPlaneFailures, float64(plane.Failures))
		send(lbDataPlaneRepairs, float64(plane.Repairs))
		for attached, n := range plane.FastPath {
			send(lbFastPathInterfaces, float64(n), strconv.FormatBool(attached))
		}
		sendAll(send, lbDataPlaneUnmatched, plane.Unmatched)
		sendAll(send, lbDataPlaneMoved, plane.Moved)
	}))
	return observe(apply)
}
