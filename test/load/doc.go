// Package load generates the traffic of tests and the demo: a generator of requests and of
// long-lived flows, and the application that answers both.
//
// A [Generator] sends HTTP requests at a fixed rate, each over a separate connection, whether or
// not earlier ones were answered, and keeps a number of TCP flows open over which it exchanges a
// frame every few milliseconds. It reports the outcome of all requests and flows in phases: each
// belongs to the phase in which it began, and [Generator.Take] ends a phase only once every
// outcome is known. So nothing is lost between two phases, and a request that a step broke is
// not counted against the next one.
//
// A Generator is bounded in rate, connections and time. When it ends, its goroutines have
// returned and its sockets are closed. Every duration is measured by the monotonic clock. It
// never repairs anything: a request is sent once, and a broken flow stays broken and counted,
// even if a new flow takes its place.
//
// The caller provides a function that creates sockets in a network namespace, and evaluates the
// numbers of a [Result]: only the caller knows which targets left.
//
// A lost packet is not a lost request: TCP retransmits it, a SYN after a second. Retransmissions
// show in Result.Slowest and in the longest gap.
package load
