// Package availability implements client and server of loadbalancer.v1.StreamAvailabilityService. A
// load balancer of Meridio 1.x uses this service to report to the frontend of its pod whether it
// forwards traffic: one state for all VIPs, without a lease.
//
// A [Client] reads the state in a frontend of vipgate, as [readiness.Fallback] for a load balancer
// without ReadinessService. An available load balancer counts as ready for every VIP. The stream
// is silent while the state is unchanged. Therefore the client probes on a second connection: each
// second for liveness, and every 30 s for the state, the first message of another Watch. Each
// timely response renews the lease. The lease of a load balancer that hangs expires 1 to 2 s
// later, and its next timely response restores it. The end of the stream ends the readiness
// immediately.
//
// A [Server] serves the state in lb for a frontend of Meridio 1.x: available while at least one VIP
// is READY under a valid lease of the readiness table. The server sends "unavailable" when the load
// balancer goes away, when the loop that evaluates readiness hangs, and before it ends a stream. A
// client that does not read blocks only its own stream.
package availability
