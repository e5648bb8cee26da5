package metrics

import (
	"time"
)

// Frontend holds the metrics of a frontend. Its methods are safe for concurrent use and do not
// block. Create one with [NewFrontend].
type Frontend struct {
	*process
	*vips
	// DecisionLatency observes the time from an input to the end of the write of the UPDATE.
	DecisionLatency func(time.Duration)
	// ControlLatency observes the duration of a BIRD command.
	ControlLatency func(time.Duration)
}

// NewFrontend returns the metrics of a frontend in a new registry, including the collectors of
// the Go runtime and of the process.
func NewFrontend(version string) *Frontend {
	// The median is about 0.1 ms; a busy node takes milliseconds; the write deadline is 1 s.
	decision := FrontendDecisionLatency.histogram(
		50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1)
	// 0.03 ms on an open socket; a reply after 2 s is a hang.
	control := FrontendBIRDControlLatency.histogram(
		20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 100e-3, 500e-3, 1, 2)
	f := &Frontend{
		process: newProcess("frontend", version),
		vips: newVIPs(FrontendVIPState, FrontendVIPReason, FrontendVIPs, FrontendVIPTransitions,
			"withdrawn", "depreferred", "announced"),
		DecisionLatency: observe(decision),
		ControlLatency:  observe(control),
	}
	f.registry.MustRegister(scrape(f.vips.collect), f.transitions, decision, control)
	return f
}

// FrontendState is the state of the frontend at a scrape.
type FrontendState struct {
	// Sessions counts sessions with BIRD, and Repairs the repairs of source routing, since the start.
	Sessions, Repairs uint64
	// Stream is nil when gating is off.
	Stream *Stream
	BIRD   BIRD
	// NSP is nil with the trench file.
	NSP *NSP
}

// NSP is the state of the NSP as the source of the configuration.
type NSP struct {
	// Connected reports whether the NSP confirms the configuration in force, and Cached whether this
	// configuration came from the cache. Registered reports whether the frontend is registered.
	Connected, Cached, Registered bool
	// The three counters count, since the start, failed watches, failed reads and writes of the
	// cache, and failed registrations.
	Failures, CacheFailures, RegistrationFailures uint64
	// SecretFailures counts failed watches of Secrets, and SecretsUnknown the watches that fail now.
	SecretFailures uint64
	SecretsUnknown int
	// Refused counts refused objects by kind.
	Refused map[string]int
}

// Stream is the state of the readiness stream.
type Stream struct {
	// Live reports whether the lease is valid.
	Live bool
	// LastMessage is the time of the newest message, and LeaseEnd the end of its lease. Both are zero
	// before the first message.
	LeaseEnd, LastMessage time.Time
	// Reconnects counts streams opened again after a loss, and Moves the planned moves to a second
	// connection, since the start.
	Reconnects, Moves uint64
	// ProbeFailures counts probes of a Meridio load balancer that got no answer in time.
	ProbeFailures uint64
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
	// Restores counts configurations that another process had replaced.
	Restores uint64
	Gateways []Gateway
}

// Gateway is one BGP session.
type Gateway struct {
	Name, Family string
	Up           bool
	// ImportsBlocked reports whether the gateway sent more routes than the import limit.
	ImportsBlocked bool
	Held           bool // a static gateway whose BFD session the frontend keeps down
	// Since is the time at which the session came up or went down.
	Since time.Time
	// Imported and Exported count routes, and Expected the routes that BIRD should export.
	Imported, Exported, Expected int
}

// State adds the metrics of the frontend's state; each scrape calls read, which must not block.
func (f *Frontend) State(read func() FrontendState) {
	f.registry.MustRegister(scrape(func(send send) {
		s := read()
		send(FrontendAnnouncerSessions, float64(s.Sessions))
		send(FrontendRoutingRepairs, float64(s.Repairs))
		send(FrontendGating, boolValue(s.Stream != nil))
		if s.Stream != nil {
			s.Stream.collect(send)
		}
		s.BIRD.collect(send)
		if s.NSP != nil {
			s.NSP.collect(send)
		}
	}))
}

func (n *NSP) collect(send send) {
	send(FrontendNSPConnected, boolValue(n.Connected))
	send(FrontendNSPCached, boolValue(n.Cached))
	send(FrontendNSPFailures, float64(n.Failures))
	for kind, count := range n.Refused {
		send(FrontendNSPRefused, float64(count), kind)
	}
	send(FrontendNSPCacheFailures, float64(n.CacheFailures))
	send(FrontendNSPRegistered, boolValue(n.Registered))
	send(FrontendNSPRegistrationFailures, float64(n.RegistrationFailures))
	send(FrontendSecretFailures, float64(n.SecretFailures))
	send(FrontendSecretsUnknown, float64(n.SecretsUnknown))
}

func (s *Stream) collect(send send) {
	send(FrontendLBLive, boolValue(s.Live))
	send(FrontendStreamReconnects, float64(s.Reconnects))
	send(FrontendStreamMoves, float64(s.Moves))
	send(FrontendProbeFailures, float64(s.ProbeFailures))
	if !s.LastMessage.IsZero() {
		send(FrontendLBLeaseAge, max(0, time.Since(s.LastMessage).Seconds()))
	}
	if !s.LeaseEnd.IsZero() {
		send(FrontendLBLeaseRemaining, time.Until(s.LeaseEnd).Seconds())
	}
}

func (b *BIRD) collect(send send) {
	send(FrontendBIRDUp, boolValue(b.Up))
	send(FrontendBIRDRestarts, float64(b.Restarts))
	send(FrontendBIRDConfigures, float64(b.Configures))
	send(FrontendBIRDConfigured, boolValue(b.Configured))
	send(FrontendBIRDRefusals, float64(b.Refusals))
	send(FrontendBIRDRestores, float64(b.Restores))
	for _, g := range b.Gateways {
		uptime := 0.0
		if g.Up && !g.Since.IsZero() {
			uptime = max(0, time.Since(g.Since).Seconds())
		}
		send(FrontendGatewayUp, boolValue(g.Up), g.Name, g.Family)
		send(FrontendGatewayUptime, uptime, g.Name, g.Family)
		send(FrontendGatewayHeld, boolValue(g.Held), g.Name, g.Family)
		send(FrontendGatewayImported, float64(g.Imported), g.Name, g.Family)
		send(FrontendGatewayImportsBlocked, boolValue(g.ImportsBlocked), g.Name, g.Family)
		send(FrontendGatewayExported, float64(g.Exported), g.Name, g.Family)
		send(FrontendGatewayExpected, float64(g.Expected), g.Name, g.Family)
	}
}
