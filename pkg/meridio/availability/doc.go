// Package availability implements the client of loadbalancer.v1.StreamAvailabilityService, by which
// a load balancer of Meridio 1.x reports to the frontend of its pod whether it forwards traffic:
// one state for all VIPs, without a lease.
//
// A [Client] is the [readiness.Fallback] for a load balancer without ReadinessService. An available
// load balancer counts as ready for every VIP. The stream is silent while the state is unchanged.
// Therefore the client probes on a second connection: each second for liveness, and every 30 s for
// the state, the first message of another Watch. Each timely response renews the lease. The lease
// of a load balancer that hangs expires 1 to 2 s later, and its next timely response restores it.
// The end of the stream ends the readiness immediately.
package availability
