package metrics

import "github.com/prometheus/client_golang/prometheus"

// Meridio is the state of a frontend in a pod of Meridio 1.x. All counters count since the start.
type Meridio struct {
	// Connected reports whether the NSP confirms the configuration in force, Cached whether this
	// configuration came from the cache, and Registered whether the frontend is registered.
	Connected, Cached, Registered bool
	// WatchFailures counts failed watches of the NSP, CacheFailures failed reads and writes of the
	// cache, and RegistrationFailures failed registrations.
	WatchFailures, CacheFailures, RegistrationFailures uint64
	// SecretFailures counts failed watches of Secrets, and SecretsUnknown the watches that fail now.
	SecretFailures uint64
	SecretsUnknown int
	// Refused counts refused objects by kind.
	Refused map[string]int
	// ProbeFailures counts probes that the load balancer did not answer in time.
	ProbeFailures uint64
}

// NewMeridio returns the collector of the state that read, without blocking, returns at a scrape.
func NewMeridio(read func() Meridio) prometheus.Collector {
	return scrape(func(send send) {
		s := read()
		send(frontendNSPConnected, boolValue(s.Connected))
		send(frontendNSPCached, boolValue(s.Cached))
		send(frontendNSPFailures, float64(s.WatchFailures))
		sendAll(send, frontendNSPRefused, s.Refused)
		send(frontendNSPCacheFailures, float64(s.CacheFailures))
		send(frontendNSPRegistered, boolValue(s.Registered))
		send(frontendNSPRegistrationFailures, float64(s.RegistrationFailures))
		send(frontendSecretFailures, float64(s.SecretFailures))
		send(frontendSecretsUnknown, float64(s.SecretsUnknown))
		send(frontendProbeFailures, float64(s.ProbeFailures))
	})
}
