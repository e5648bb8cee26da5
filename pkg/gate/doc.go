// Package gate decides which VIPs are advertised.
//
// A [Gate] is a pure state machine: inputs and the time are passed to its methods, [Gate.Evaluate]
// returns the changed decisions, and [Gate.Deadline] returns the time of the next evaluation. It
// does no I/O, starts no goroutine, reads no clock, and is not safe for concurrent use.
//
// Invariants:
//   - A VIP is announced only while it is configured, its source routing is installed in the
//     kernel, a gateway of its family is up, and the load balancer reports READY under a valid
//     lease.
//   - Evaluate lowers an advertisement without delay; only a rise is delayed (flap damping).
//   - A new weight alone is a new decision at most once in 10 s.
//   - A stale state or a drain never raises a withdrawn VIP.
//   - [Gate.Attract], which static gateways follow, does not depend on the gateways.
//   - VIPs and address families are independent of each other.
//   - The cost of a change of one VIP does not depend on the number of VIPs.
package gate
