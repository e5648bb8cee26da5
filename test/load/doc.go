// Package load generates the traffic of tests and the demo: a generator of requests and of
// long-lived flows, and the application that answers both.
//
// A [Generator] sends HTTP requests at a fixed rate, each over a connection of
// its own, whether or not earlier ones were answered, and keeps a number of TCP
// flows open over which it exchanges a frame every few milliseconds. It says
// what became of all of it, in phases: everything belongs to the phase in
// which it began, and [Generator.Take] ends a phase only once the fate of all
// of it is known. So nothing is lost between two phases, and a request that a
// step broke is not counted against the next one.
//
// It guarantees that it is bounded, in rate, connections and time; that it ends
// with every goroutine and socket of its own; that every duration is measured by
// the monotonic clock; and that it never repairs anything: a request is sent
// once, and what broke stays broken and counted, also if a new flow takes its
// place.
//
// What it leaves to others: where sockets are created (it is handed a function that
// runs another one in a network namespace), and the evaluation, for which a
// [Result] has the numbers: only its user knows which targets left.
//
// A lost packet is not a lost request: TCP sends again, a SYN after a second.
// Such things show in Result.Slowest and in the longest gap.
package load
