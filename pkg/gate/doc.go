// Package gate decides which VIPs are advertised.
//
// A [Gate] is a pure state machine: inputs and the time go in by method calls,
// [Gate.Evaluate] gives back what changed, [Gate.Deadline] tells when to look
// again. It does no I/O, starts no goroutine and reads no clock, and it is not
// safe for concurrent use: one goroutine owns it.
//
// It guarantees that
//   - a VIP is announced only while it is configured, its source routing is in
//     the kernel, a gateway of its family is up and the load balancer's word,
//     still under its lease, says READY;
//   - whatever lowers an advertisement does so at the next Evaluate; only a
//     rise can wait (flapping);
//   - a stale word and a drain never raise a VIP that is withdrawn;
//   - VIPs and address families do not influence each other;
//   - the cost of a change of one VIP does not depend on how many there are.
//
// It leaves to others how the inputs are learned, and how a decision reaches
// the gateways.
package gate
