package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Kube holds the metrics of kube. Its methods are safe for concurrent use and do not block. Create
// one with [NewKube].
type Kube struct {
	*process
	publications *prometheus.CounterVec
	leader       *prometheus.GaugeVec
	translation  func(time.Duration)
	latency      func(time.Duration)
}

// KubeState is the state of kube at a scrape.
type KubeState struct {
	// Writes, WriteFailures and APIErrors count since the start.
	Writes, WriteFailures, APIErrors uint64
	// Written is the time of the last write of a file; zero before the first.
	Written time.Time
	// Stale is the time for which the trench file may have been older than the objects.
	Stale time.Duration
	// Objects counts the watched objects by kind, and Refused those that the last translation refused.
	Objects map[string]int
	Refused map[string]int
}

// NewKube returns the metrics of kube in a new registry, including the collectors of the Go
// runtime and of the process. Each scrape calls read.
func NewKube(version string, read func() KubeState) *Kube {
	// Goals for 500 targets: 10 ms, and 50 ms.
	latency := kubeLatency.histogram(5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1, 2)
	translation := kubeTranslation.histogram(1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1)
	kube := &Kube{
		newProcess("kube", version), kubePublications.counters(), kubeLeader.gauges(), observe(translation),
		observe(latency),
	}
	kube.registry.MustRegister(translation, latency, scrape(func(send send) {
		state := read()
		send(kubeWrites, float64(state.Writes))
		send(kubeWriteFailures, float64(state.WriteFailures))
		if !state.Written.IsZero() {
			send(kubeWritten, float64(state.Written.UnixMilli())/1000)
		}
		send(kubeStale, state.Stale.Seconds())
		send(kubeAPIErrors, float64(state.APIErrors))
		sendAll(send, kubeObjects, state.Objects)
		sendAll(send, kubeRefused, state.Refused)
	}), kube.publications, kube.leader)
	return kube
}

// Translated observes the duration of a translation.
func (kube *Kube) Translated(duration time.Duration) { kube.translation(duration) }

// Written observes the time from a watch event to the write of the resulting files.
func (kube *Kube) Written(duration time.Duration) { kube.latency(duration) }

// PublicationWrite counts a write of a resource, such as services, by its result: written,
// conflict, forbidden, refused or unreachable.
func (kube *Kube) PublicationWrite(resource, result string) {
	kube.publications.WithLabelValues(resource, result).Inc()
}

// Leader sets whether this pod writes the status of the objects.
func (kube *Kube) Leader(leads bool) { kube.leader.WithLabelValues().Set(boolValue(leads)) }
