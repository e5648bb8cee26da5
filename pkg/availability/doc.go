// Package availability speaks loadbalancer.v1.StreamAvailabilityService, with which a load balancer
// of Meridio 1.x reports to the frontend of its pod whether it forwards anything: one state for all
// VIPs, without a lease.
//
// A [Client] reads it in a frontend of vipgate, as [readiness.Fallback] of a load balancer without
// ReadinessService. An available load balancer counts as ready for every VIP. The stream is silent
// while nothing changes, so a probe asks each second on a second connection for a sign of life, and
// each 30 s for the first message of another Watch. Each answer in time renews the lease; the lease
// of a load balancer that hangs expires 1 to 2 s later, and its next answer in time restores it.
// The end of the stream ends the readiness at once.
//
// A [Server] serves it in lb for a frontend of Meridio 1.x: available while at least one VIP is
// READY under a valid lease of the readiness table. It says "unavailable" when the load balancer
// goes away, when the loop that evaluates readiness hangs, and before it ends a stream. A reader
// that does not read blocks its own stream only.
package availability
