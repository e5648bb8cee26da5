// Package availability implements the server of loadbalancer.v1.StreamAvailabilityService, by which
// lb reports to a frontend of Meridio 1.x in its pod whether it forwards traffic: one state for all
// VIPs, without a lease.
//
// The load balancer is available while at least one VIP is READY under a valid lease of the
// readiness table. The server sends "unavailable" when the load balancer goes away, when the loop
// that evaluates readiness hangs, and before it ends a stream. A client that does not read blocks
// only its own stream.
package availability
