// Package serving derives the readiness of each VIP and the desired data plane from targets,
// their health checks and the confirmed kernel state.
//
// An [Evaluator] is a pure state machine: inputs and the time are passed to its methods,
// [Evaluator.Evaluate] returns the VIPs whose readiness changed, [Evaluator.Forward] the next
// desired state of the data plane. It does no I/O, starts no goroutine, reads no clock, and is not
// safe for concurrent use.
//
// Invariants:
//   - A VIP is ready only while a stream that serves it has minReady ready targets of its family,
//     or draining targets whose replacements are about to take over.
//   - With a data plane only confirmed kernel state counts, without the entries that a newer
//     desired state removes.
//   - The last target that forwards a VIP leaves the desired state only after the frontend withdrew
//     the VIP, is not connected, or exceeded the time to withdraw.
//   - A VIP of a new stream rises once each of its targets has a verdict and no more targets
//     register. Both waits are bounded.
//   - The cost of a change follows the streams that it concerns, not the number of VIPs or streams.
//   - Results list VIPs in the order of [vip.Compare].
package serving
