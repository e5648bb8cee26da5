package metrics

import "github.com/prometheus/client_golang/prometheus"

// LB holds the metrics of a load balancer. Its methods are safe for concurrent use and do not
// block. Create one with [NewLB].
type LB struct {
	*process
	vips        *vips
	transitions *prometheus.CounterVec
	connected   *prometheus.GaugeVec
	advertised  *prometheus.GaugeVec
	targets     targets
}

// NewLB returns the metrics of a load balancer in a new registry, with those of the Go runtime and
// of the process.
func NewLB(version string) *LB {
	d := describe()
	l := &LB{
		process:     newProcess(d, "lb", version),
		vips:        newVIPs(d.desc(LBVIPState, Gauge), d.desc(LBVIPReason, Gauge), d.desc(LBVIPs, Gauge)),
		transitions: d.counters(LBVIPTransitions),
		connected:   d.gauges(LBFrontendConnected),
		advertised:  d.gauges(LBFrontendVIPs),
	}
	l.vips.levels = map[string]float64{"not_ready": 0, "draining": 1, "ready": 2}
	l.vips.best = "ready"
	l.vips.ready, l.vips.total = d.desc(LBVIPReadyTargets, Gauge), d.desc(LBVIPTargets, Gauge)
	l.targets.states, l.targets.suspect = d.desc(LBTargets, Gauge), d.desc(LBSuspect, Gauge)
	l.targets.live, l.targets.count = d.desc(LBSourceLive, Gauge), d.desc(LBSourceTargets, Gauge)
	l.targets.problems, l.targets.refusals = d.desc(LBSourceProblems, Gauge), d.desc(LBSourceRefusals, Counter)
	l.registry.MustRegister(l.vips, l.transitions, l.connected, l.advertised, &l.targets)
	return l
}

// VIP sets the readiness of a VIP, its reason, and its number of ready targets. It counts a change
// of the state.
func (l *LB) VIP(v VIP, state, reason string, ready, total uint32) {
	s := vipState{label(state), label(reason), ready, total}
	if l.vips.set(v.Prefix(), s) {
		l.transitions.WithLabelValues(s.state, s.reason).Inc()
	}
}

// RemoveVIP removes a VIP.
func (l *LB) RemoveVIP(v VIP) { l.vips.remove(v.Prefix()) }

// Frontend sets whether a reporting frontend is connected, and how many VIPs it advertises.
func (l *LB) Frontend(connected bool, advertised int) {
	l.connected.WithLabelValues().Set(boolValue(connected))
	l.advertised.WithLabelValues().Set(float64(advertised))
}

// Targets sets the function that each scrape calls for the state of the targets and their sources.
func (l *LB) Targets(read func() Targets) { l.targets.read.Store(&read) }
