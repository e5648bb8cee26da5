package metrics

import (
	"maps"
	"runtime"
	"strings"
	"sync"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"
)

func (m Metric) gauges() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: m.Name, Help: m.Help}, m.Labels)
}

func (m Metric) counters() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.Name, Help: m.Help}, m.Labels)
}

func (m Metric) histogram(buckets ...float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: m.Name, Help: m.Help, Buckets: buckets})
}

// observe returns a function that observes durations. It does not block.
func observe(h prometheus.Histogram) func(time.Duration) {
	return func(d time.Duration) { h.Observe(d.Seconds()) }
}

// send adds one value of a metric to a scrape.
type send func(m Metric, value float64, labels ...string)

// scrape collects metrics that are read at each scrape. It is an unchecked collector without
// descriptors; a test compares its metrics with [All] instead.
type scrape func(send)

func (s scrape) Describe(chan<- *prometheus.Desc) {}

func (s scrape) Collect(ch chan<- prometheus.Metric) {
	s(func(m Metric, value float64, labels ...string) {
		valueType := prometheus.GaugeValue
		if m.Type == Counter {
			valueType = prometheus.CounterValue
		}
		ch <- prometheus.MustNewConstMetric(m.desc, valueType, value, labels...)
	})
}

// process holds the metrics that all programs have. It is safe for concurrent use.
type process struct {
	registry *prometheus.Registry
	valid    *prometheus.GaugeVec
	stale    *prometheus.GaugeVec
	reloads  *prometheus.CounterVec
	notAfter *prometheus.GaugeVec
	serving  *prometheus.GaugeVec
	calls    *grpcprom.ServerMetrics

	mu       sync.Mutex
	identity string // SPIFFE ID in the label of notAfter
}

func newProcess(program, version string) *process {
	p := &process{
		registry: prometheus.NewRegistry(),
		valid:    ConfigurationValid.gauges(),
		stale:    ConfigurationStale.gauges(),
		reloads:  ConfigurationReloads.counters(),
		notAfter: IdentityNotAfter.gauges(),
		serving:  HealthServing.gauges(),
		// The histogram of the handling time is omitted: the client determines the duration of a stream,
		// and time-critical operations (decisions, replies of BIRD) have their own histograms.
		calls: grpcprom.NewServerMetrics(),
	}
	build := BuildInfo.gauges()
	build.WithLabelValues(program, version, runtime.Version()).Set(1)
	for _, ok := range []bool{true, false} {
		p.reloads.WithLabelValues(result(ok))
	}
	p.registry.MustRegister(build, p.valid, p.stale, p.reloads, p.notAfter, p.serving, p.calls,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return p
}

func result(ok bool) string {
	if ok {
		return "accepted"
	}
	return "refused"
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Registry returns the registry for [NewServer].
func (p *process) Registry() *prometheus.Registry { return p.registry }

// Configuration sets whether the trench file on disk is in force.
func (p *process) Configuration(valid bool) { p.valid.WithLabelValues().Set(boolValue(valid)) }

// Stale sets the time since the last refresh of the trench file; 0 means current.
func (p *process) Stale(age time.Duration) { p.stale.WithLabelValues().Set(age.Seconds()) }

// Reload counts an accepted or refused change of the trench file.
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

// Health sets whether a health service is SERVING. It is the argument of health.New.
func (p *process) Health(service string, serving bool) {
	p.serving.WithLabelValues(service).Set(boolValue(serving))
}

// LostLines sets the function that returns the number of lost log lines.
func (p *process) LostLines(lost func() uint64) {
	p.registry.MustRegister(scrape(func(send send) { send(LogLinesLost, float64(lost())) }))
}

// ServerOptions returns the options with which a gRPC server counts its calls. All servers of the
// process share the counters.
func (p *process) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(p.calls.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(p.calls.StreamServerInterceptor()),
	}
}

// Serves sets the counters of a server's methods to 0 after its services are registered. Each
// method takes twenty series, so the series of debugging services (reflection, channelz) are
// created by the first call.
func (p *process) Serves(server reflection.ServiceInfoProvider) {
	p.calls.InitializeMetrics(initialZero{server})
}

// initialZero selects the services whose counters start at 0.
type initialZero struct{ reflection.ServiceInfoProvider }

func (w initialZero) GetServiceInfo() map[string]grpc.ServiceInfo {
	services := maps.Clone(w.ServiceInfoProvider.GetServiceInfo())
	maps.DeleteFunc(services, func(name string, _ grpc.ServiceInfo) bool {
		return !strings.HasPrefix(name, "vipgate.") && !strings.HasPrefix(name, "grpc.health.")
	})
	return services
}
