package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Frontend holds the metrics of a frontend. Its methods are safe for concurrent use and do not
// block. Create one with [NewFrontend].
type Frontend struct {
	*process
	vips        *vips
	transitions *prometheus.CounterVec
	decision    prometheus.Histogram
	gating      *prometheus.GaugeVec
	control     prometheus.Histogram
	sessions    total
	repairs     total
	stream      stream
	bird        birdCollector
}

// NewFrontend returns the metrics of a frontend in a new registry, with those of the Go runtime and
// of the process.
func NewFrontend(version string) *Frontend {
	d := describe()
	f := &Frontend{
		process:     newProcess(d, "frontend", version),
		vips:        newVIPs(d.desc(FrontendVIPState, Gauge), d.desc(FrontendVIPReason, Gauge), d.desc(FrontendVIPs, Gauge)),
		transitions: d.counters(FrontendVIPTransitions),
		// The median is about 0.1 ms; a busy node takes milliseconds; the write deadline is 1 s.
		decision: d.histogram(FrontendDecisionLatency, []float64{
			50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1,
		}),
		gating: d.gauges(FrontendGating),
		// 0.03 ms on an open socket; a reply after 2 s is a hang.
		control: d.histogram(FrontendBIRDControlLatency, []float64{
			20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 100e-3, 500e-3, 1, 2,
		}),
	}
	f.vips.levels = map[string]float64{"withdrawn": 0, "depreferred": 1, "announced": 2}
	f.vips.best = "announced"
	f.sessions.desc, f.repairs.desc = d.desc(FrontendAnnouncerSessions, Counter), d.desc(FrontendRoutingRepairs, Counter)
	f.stream.live, f.stream.age, f.stream.remaining = d.desc(FrontendLBLive, Gauge), d.desc(FrontendLBLeaseAge, Gauge),
		d.desc(FrontendLBLeaseRemaining, Gauge)
	f.stream.reconnects, f.stream.moves = d.desc(FrontendStreamReconnects, Counter), d.desc(FrontendStreamMoves, Counter)
	f.bird.up, f.bird.restarts, f.bird.configures = d.desc(FrontendBIRDUp, Gauge), d.desc(FrontendBIRDRestarts, Counter),
		d.desc(FrontendBIRDConfigures, Counter)
	f.bird.configured, f.bird.refusals = d.desc(FrontendBIRDConfigured, Gauge), d.desc(FrontendBIRDRefusals, Counter)
	f.bird.gatewayUp, f.bird.uptime = d.desc(FrontendGatewayUp, Gauge), d.desc(FrontendGatewayUptime, Gauge)
	f.bird.imported, f.bird.exported = d.desc(FrontendGatewayImported, Gauge), d.desc(FrontendGatewayExported, Gauge)
	f.registry.MustRegister(f.vips, f.transitions, f.decision, f.gating, f.control, &f.sessions, &f.repairs, &f.stream,
		&f.bird)
	return f
}

// VIP sets the advertisement of a VIP and its reason.
func (f *Frontend) VIP(v VIP, advertisement, reason string) {
	f.vips.set(v.Prefix(), vipState{state: label(advertisement), reason: label(reason)})
}

// RemoveVIP removes a VIP that left the configuration.
func (f *Frontend) RemoveVIP(v VIP) { f.vips.remove(v.Prefix()) }

// Transition counts a change of a VIP's advertisement.
func (f *Frontend) Transition(to, reason string) {
	f.transitions.WithLabelValues(label(to), label(reason)).Inc()
}

// DecisionLatency observes the time from an input to the end of the write of the UPDATE.
func (f *Frontend) DecisionLatency(d time.Duration) { f.decision.Observe(d.Seconds()) }

// Gating sets whether readiness gates advertisements.
func (f *Frontend) Gating(on bool) { f.gating.WithLabelValues().Set(boolValue(on)) }

// ControlLatency observes the duration of a BIRD command.
func (f *Frontend) ControlLatency(d time.Duration) { f.control.Observe(d.Seconds()) }

// Announcer sets the number of sessions with BIRD since the start.
func (f *Frontend) Announcer(sessions uint64) { f.sessions.set(sessions) }

// Routing sets the number of repairs of source routing since the start.
func (f *Frontend) Routing(repairs uint64) { f.repairs.set(repairs) }

// Stream sets the function that each scrape calls for the state of the readiness stream: a lease is
// renewed too often to be pushed. read must not block.
func (f *Frontend) Stream(read func() Stream) { f.stream.read.Store(&read) }

// BIRD sets the state of BIRD and its sessions. The gateways are not copied.
func (f *Frontend) BIRD(b BIRD) { f.bird.now.Store(&b) }

// Stream is the state of the readiness stream.
type Stream struct {
	// Live reports whether the lease is valid.
	Live bool
	// LeaseEnd and LastMessage are those of the newest message; zero before the first.
	LeaseEnd, LastMessage time.Time
	// Reconnects counts streams opened again after a loss, and Moves the planned moves to a second
	// connection, since the start.
	Reconnects, Moves uint64
}

// BIRD is the state of the BIRD process and its sessions.
type BIRD struct {
	Up bool
	// Restarts and Configures count since the frontend started.
	Restarts, Configures uint64
	// Configured reports whether BIRD has the desired configuration; Refusals counts failed
	// configure commands.
	Configured bool
	Refusals   uint64
	Gateways   []Gateway
}

// Gateway is one BGP session.
type Gateway struct {
	Name, Family string
	Up           bool
	// Since is when the session came up or went down.
	Since time.Time
	// Imported and Exported count routes.
	Imported, Exported int
}

// total is a counter whose value is maintained elsewhere. It is absent until it is set.
type total struct {
	desc  *prometheus.Desc
	known atomic.Bool
	value atomic.Uint64
}

func (t *total) set(n uint64) {
	t.value.Store(n)
	t.known.Store(true)
}

// Describe implements prometheus.Collector.
func (t *total) Describe(ch chan<- *prometheus.Desc) { ch <- t.desc }

// Collect implements prometheus.Collector.
func (t *total) Collect(ch chan<- prometheus.Metric) {
	if t.known.Load() {
		ch <- counter(t.desc, t.value.Load())
	}
}

// stream collects the metrics of the readiness stream at a scrape.
type stream struct {
	live, age, remaining, reconnects, moves *prometheus.Desc
	read                                    atomic.Pointer[func() Stream]
}

// Describe implements prometheus.Collector.
func (s *stream) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{s.live, s.age, s.remaining, s.reconnects, s.moves} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *stream) Collect(ch chan<- prometheus.Metric) {
	read := s.read.Load()
	if read == nil {
		return // gating is off
	}
	now := (*read)()
	ch <- gauge(s.live, boolValue(now.Live))
	ch <- counter(s.reconnects, now.Reconnects)
	ch <- counter(s.moves, now.Moves)
	if !now.LastMessage.IsZero() {
		ch <- gauge(s.age, max(0, time.Since(now.LastMessage).Seconds()))
	}
	if !now.LeaseEnd.IsZero() {
		ch <- gauge(s.remaining, time.Until(now.LeaseEnd).Seconds())
	}
}

// birdCollector collects the metrics of BIRD at a scrape.
type birdCollector struct {
	up, restarts, configures              *prometheus.Desc
	configured, refusals                  *prometheus.Desc
	gatewayUp, uptime, imported, exported *prometheus.Desc
	now                                   atomic.Pointer[BIRD]
}

// Describe implements prometheus.Collector.
func (b *birdCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		b.up, b.restarts, b.configures, b.configured, b.refusals, b.gatewayUp, b.uptime,
		b.imported, b.exported,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (b *birdCollector) Collect(ch chan<- prometheus.Metric) {
	now := b.now.Load()
	if now == nil {
		return
	}
	ch <- gauge(b.up, boolValue(now.Up))
	ch <- counter(b.restarts, now.Restarts)
	ch <- counter(b.configures, now.Configures)
	ch <- gauge(b.configured, boolValue(now.Configured))
	ch <- counter(b.refusals, now.Refusals)
	for _, g := range now.Gateways {
		uptime := 0.0
		if g.Up && !g.Since.IsZero() {
			uptime = max(0, time.Since(g.Since).Seconds())
		}
		ch <- gauge(b.gatewayUp, boolValue(g.Up), g.Name, g.Family)
		ch <- gauge(b.uptime, uptime, g.Name, g.Family)
		ch <- gauge(b.imported, float64(g.Imported), g.Name, g.Family)
		ch <- gauge(b.exported, float64(g.Exported), g.Name, g.Family)
	}
}
