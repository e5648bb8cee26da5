// Package serving derives the readiness of each VIP and the desired data plane from targets,
// their health checks and what the kernel confirmed.
//
// An [Evaluator] is a pure state machine: inputs and the time are passed to its methods,
// [Evaluator.Evaluate] returns the VIPs whose readiness changed, [Evaluator.Forward] the next
// desired state of the data plane. It does no I/O, starts no goroutine, reads no clock, and is not
// safe for concurrent use.
//
// Invariants:
//   - A VIP is ready only while a stream that serves it has minReady ready targets of its family,
//     or targets that drain while others are about to take over.
//   - With a data plane only what the kernel confirmed counts, and nothing that a newer desired
//     state removes.
//   - The last target that forwards a VIP leaves the desired state only after the frontend withdrew
//     the VIP, or cannot, or had the time to.
//   - No VIP of a new stream rises before each of its targets has a verdict, nor while its targets
//     still register one after the other, for a bounded time.
//   - The cost of a change follows the streams that it concerns, not the number of VIPs or streams.
//   - Results list VIPs in the order of [vip.Compare].
package serving
