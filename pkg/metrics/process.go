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

func (metric Metric) gauges() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: metric.Name, Help: metric.Help}, metric.Labels)
}

func (metric Metric) counters() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: metric.Name, Help: metric.Help}, metric.Labels)
}

func (metric Metric) histogram(buckets ...float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{Name: metric.Name, Help: metric.Help, Buckets: buckets})
}

// observe returns a function that observes durations. It does not block.
func observe(h prometheus.Histogram) func(time.Duration) {
	return func(duration time.Duration) { h.Observe(duration.Seconds()) }
}

// send adds one value of a metric to a scrape.
type send func(m Metric, value float64, labels ...string)

// sendAll adds the values of a metric with one label.
func sendAll[N int | uint64](send send, metric Metric, values map[string]N) {
	for label, value := range values {
		send(metric, float64(value), label)
	}
}

// scrape collects metrics that are read at each scrape. It is an unchecked collector without
// descriptors; a test compares its metrics with [All] instead.
type scrape func(send)

func (s scrape) Describe(chan<- *prometheus.Desc) {}

func (s scrape) Collect(channel chan<- prometheus.Metric) {
	s(func(metric Metric, value float64, labels ...string) {
		valueType := prometheus.GaugeValue
		if metric.Type == Counter {
			valueType = prometheus.CounterValue
		}
		channel <- prometheus.MustNewConstMetric(metric.desc, valueType, value, labels...)
	})
}

// process holds the metrics that all programs have. It is safe for concurrent use.
type process struct {
	registry *prometheus.Registry
	valid    *prometheus.GaugeVec
	stale    *prometheus.GaugeVec
	held     *prometheus.GaugeVec
	reloads  *prometheus.CounterVec
	notAfter *prometheus.GaugeVec
	serving  *prometheus.GaugeVec
	calls    *grpcprom.ServerMetrics

	mu       sync.Mutex
	identity string // SPIFFE ID in the label of notAfter
}

func newProcess(program, version string) *process {
	metrics := &process{
		registry: prometheus.NewRegistry(),
		valid:    configurationValid.gauges(),
		stale:    configurationStale.gauges(),
		held:     configurationHeld.gauges(),
		reloads:  configurationReloads.counters(),
		notAfter: identityNotAfter.gauges(),
		serving:  healthServing.gauges(),
		// The histogram of the handling time is omitted: the client determines the duration of a stream,
		// and time-critical operations (decisions, replies of BIRD) have their own histograms.
		calls: grpcprom.NewServerMetrics(),
	}
	build := buildInfo.gauges()
	build.WithLabelValues(program, version, runtime.Version()).Set(1)
	// A series that starts at 0 lets rate() count the first reload.
	for _, ok := range []bool{true, false} {
		metrics.reloads.WithLabelValues(result(ok))
	}
	metrics.registry.MustRegister(build, metrics.valid, metrics.stale, metrics.held, metrics.reloads,
		metrics.notAfter, metrics.serving, metrics.calls,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return metrics
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
func (metrics *process) Registry() *prometheus.Registry { return metrics.registry }

// Configuration sets whether the trench file on disk is in force.
func (metrics *process) Configuration(valid bool) {
	metrics.valid.WithLabelValues().Set(boolValue(valid))
}

// Stale sets the time since the last refresh of the trench file; 0 means current.
func (metrics *process) Stale(age time.Duration) { metrics.stale.WithLabelValues().Set(age.Seconds()) }

// Held sets the number of VIPs, gateways and streams whose removal waits for a confirmation.
func (metrics *process) Held(count int) { metrics.held.WithLabelValues().Set(float64(count)) }

// Reload counts an accepted or refused change of the trench file.
func (metrics *process) Reload(ok bool) { metrics.reloads.WithLabelValues(result(ok)).Inc() }

// Identity sets the SPIFFE ID of this process and its expiry. The zero time removes the metric.
func (metrics *process) Identity(spiffeID string, notAfter time.Time) {
	metrics.mu.Lock()
	defer metrics.mu.Unlock()
	// The SPIFFE ID is a label: the series of an earlier ID would remain.
	if notAfter.IsZero() || spiffeID != metrics.identity {
		metrics.notAfter.Reset()
	}
	metrics.identity = spiffeID
	if !notAfter.IsZero() {
		metrics.notAfter.WithLabelValues(spiffeID).Set(float64(notAfter.UnixMilli()) / 1000)
	}
}

// Health sets whether a health service is SERVING, or forgets it. It is the argument of health.New.
func (metrics *process) Health(service string, serving, known bool) {
	metrics.serving.WithLabelValues(service).Set(boolValue(serving))
	// An alert about a condition that was removed would never end.
	if !known {
		metrics.serving.DeleteLabelValues(service)
	}
}

// LostTraces sets the function that returns the number of decisions whose trace is not complete.
func (metrics *process) LostTraces(lost func() uint64) {
	metrics.registry.MustRegister(scrape(func(send send) { send(tracesLost, float64(lost())) }))
}

// LostLines sets the function that returns the number of lost log lines.
func (metrics *process) LostLines(lost func() uint64) {
	metrics.registry.MustRegister(scrape(func(send send) { send(logLinesLost, float64(lost())) }))
}

// ServerOptions returns the options with which a gRPC server counts its calls. All servers of the
// process share the counters.
func (metrics *process) ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(metrics.calls.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(metrics.calls.StreamServerInterceptor()),
	}
}

// Serves sets the counters of a server's methods to 0 after its services are registered. Each
// method takes twenty series, so the series of debugging services (reflection, channelz) are
// created by the first call.
func (metrics *process) Serves(server reflection.ServiceInfoProvider) {
	metrics.calls.InitializeMetrics(initialZero{server})
}

// initialZero selects the services whose counters start at 0.
type initialZero struct{ reflection.ServiceInfoProvider }

func (zero initialZero) GetServiceInfo() map[string]grpc.ServiceInfo {
	services := maps.Clone(zero.ServiceInfoProvider.GetServiceInfo())
	maps.DeleteFunc(services, func(name string, _ grpc.ServiceInfo) bool {
		return !strings.HasPrefix(name, "vipgate.") && !strings.HasPrefix(name, "grpc.health.")
	})
	return services
}
