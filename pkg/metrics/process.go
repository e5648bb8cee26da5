package metrics

import (
	"fmt"
	"runtime"
	"sync"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// descriptions maps the name of a metric to its description.
type descriptions map[string]Metric

func describe() descriptions {
	d := descriptions{}
	for _, m := range All() {
		d[m.Name] = m
	}
	return d
}

// get returns the description of a metric. It panics for an unknown name, which every test of this
// package detects.
func (d descriptions) get(name string, t Type) Metric {
	m, known := d[name]
	if !known || m.Type != t {
		panic(fmt.Sprintf("metrics: %s is not described as a %s", name, t))
	}
	return m
}

func (d descriptions) desc(name string, t Type) *prometheus.Desc {
	m := d.get(name, t)
	return prometheus.NewDesc(m.Name, m.Help, m.Labels, nil)
}

func (d descriptions) gauges(name string) *prometheus.GaugeVec {
	m := d.get(name, Gauge)
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.Name, Help: m.Help}, m.Labels)
}

func (d descriptions) counters(name string) *prometheus.CounterVec {
	m := d.get(name, Counter)
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.Name, Help: m.Help}, m.Labels)
}

func (d descriptions) histogram(name string, buckets []float64) prometheus.Histogram {
	m := d.get(name, Histogram)
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: m.Name, Help: m.Help, Buckets: buckets})
}

// process holds the metrics of both programs. It is safe for concurrent use.
type process struct {
	registry *prometheus.Registry
	valid    *prometheus.GaugeVec
	reloads  *prometheus.CounterVec
	notAfter *prometheus.GaugeVec
	serving  *prometheus.GaugeVec
	calls    *grpcprom.ServerMetrics

	mu       sync.Mutex
	identity string // SPIFFE ID that notAfter has
}

func newProcess(d descriptions, program, version string) *process {
	p := &process{
		registry: prometheus.NewRegistry(),
		valid:    d.gauges(ConfigurationValid),
		reloads:  d.counters(ConfigurationReloads),
		notAfter: d.gauges(IdentityNotAfter),
		serving:  d.gauges(HealthServing),
		calls:    newCalls(),
	}
	build := d.gauges(BuildInfo)
	build.WithLabelValues(program, version, runtime.Version()).Set(1)
	for _, result := range []string{accepted, refused} {
		p.reloads.WithLabelValues(result)
	}
	p.registry.MustRegister(build, p.valid, p.reloads, p.notAfter, p.serving, p.calls,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return p
}

// Values of the label result.
const (
	accepted = "accepted"
	refused  = "refused"
)

func result(ok bool) string {
	if ok {
		return accepted
	}
	return refused
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Registry returns the registry for [NewServer].
func (p *process) Registry() *prometheus.Registry { return p.registry }

// Configuration sets whether the trench file in force is the one on disk.
func (p *process) Configuration(valid bool) { p.valid.WithLabelValues().Set(boolValue(valid)) }

// Reload counts a change of the trench file.
func (p *process) Reload(ok bool) { p.reloads.WithLabelValues(result(ok)).Inc() }

// Identity sets the SPIFFE ID of this process and its expiry. The zero time removes the metric.
func (p *process) Identity(id string, notAfter time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if notAfter.IsZero() || id != p.identity {
		p.notAfter.Reset()
	}
	p.identity = id
	if !notAfter.IsZero() {
		p.notAfter.WithLabelValues(id).Set(float64(notAfter.UnixMilli()) / 1000)
	}
}

// Health sets whether a health service is SERVING. Its signature is that of health.Options.Changed.
func (p *process) Health(service string, serving bool) {
	p.serving.WithLabelValues(service).Set(boolValue(serving))
}
