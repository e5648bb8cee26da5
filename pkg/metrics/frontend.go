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
	decision := frontendDecisionLatency.histogram(
		50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1)
	// 0.03 ms on an open socket; a reply after 2 s is a hang.
	control := frontendBIRDControlLatency.histogram(
		20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 100e-3, 500e-3, 1, 2)
	frontend := &Frontend{
		process: newProcess("frontend", version),
		vips: newVIPs(frontendVIPState, frontendVIPReason, frontendVIPs, frontendVIPTransitions,
			"withdrawn", "depreferred", "announced"),
		DecisionLatency: observe(decision),
		ControlLatency:  observe(control),
	}
	frontend.registry.MustRegister(scrape(frontend.vips.collect), frontend.transitions, decision, control)
	return frontend
}

// FrontendState is the state of the frontend at a scrape.
type FrontendState struct {
	// Sessions counts sessions with BIRD, and Repairs the repairs of source routing, since the start.
	Sessions, Repairs uint64
	// Stream is nil when gating is off.
	Stream *Stream
	BIRD   BIRD
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
}

// BIRD is the state of the BIRD process and its sessions.
type BIRD struct {
	Up bool
	// Restarts and Configures count since the frontend started.
	Restarts, Configures uint64
	// Configured reports whether BIRD has the desired configuration; Refusals counts failed commands.
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
func (frontend *Frontend) State(read func() FrontendState) {
	frontend.registry.MustRegister(scrape(func(send send) {
		state := read()
		send(frontendAnnouncerSessions, float64(state.Sessions))
		send(frontendRoutingRepairs, float64(state.Repairs))
		send(frontendGating, boolValue(state.Stream != nil))
		if state.Stream != nil {
			state.Stream.collect(send)
		}
		state.BIRD.collect(send)
	}))
}

func (stream *Stream) collect(send send) {
	send(frontendLBLive, boolValue(stream.Live))
	send(frontendStreamReconnects, float64(stream.Reconnects))
	send(frontendStreamMoves, float64(stream.Moves))
	if !stream.LastMessage.IsZero() {
		send(frontendLBLeaseAge, max(0, time.Since(stream.LastMessage).Seconds()))
	}
	if !stream.LeaseEnd.IsZero() {
		// Negative after the end: it shows how long the lease has been over.
		send(frontendLBLeaseRemaining, time.Until(stream.LeaseEnd).Seconds())
	}
}

func (bird *BIRD) collect(send send) {
	send(frontendBIRDUp, boolValue(bird.Up))
	send(frontendBIRDRestarts, float64(bird.Restarts))
	send(frontendBIRDConfigures, float64(bird.Configures))
	send(frontendBIRDConfigured, boolValue(bird.Configured))
	send(frontendBIRDRefusals, float64(bird.Refusals))
	send(frontendBIRDRestores, float64(bird.Restores))
	for _, gateway := range bird.Gateways {
		uptime := 0.0
		if gateway.Up && !gateway.Since.IsZero() {
			uptime = max(0, time.Since(gateway.Since).Seconds())
		}
		send(frontendGatewayUp, boolValue(gateway.Up), gateway.Name, gateway.Family)
		send(frontendGatewayUptime, uptime, gateway.Name, gateway.Family)
		send(frontendGatewayHeld, boolValue(gateway.Held), gateway.Name, gateway.Family)
		send(frontendGatewayImported, float64(gateway.Imported), gateway.Name, gateway.Family)
		send(frontendGatewayImportsBlocked, boolValue(gateway.ImportsBlocked), gateway.Name, gateway.Family)
		send(frontendGatewayExported, float64(gateway.Exported), gateway.Name, gateway.Family)
		send(frontendGatewayExpected, float64(gateway.Expected), gateway.Name, gateway.Family)
	}
}
