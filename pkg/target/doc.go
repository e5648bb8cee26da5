// Package target knows the targets of the streams, where they come from, and how
// healthy they are.
//
// Sources: the trench file ([TrenchFile]), the registry ([Registry], served by
// [TargetService]) and drains by hand ([Drains]). [Set] unites what they offer,
// pure and at a cost that follows what changed; what it cannot take it names, and
// the others go on. The readiness directory ([Directory]) knows no targets: its
// [Listing] says of streams and VIPs that they are ready. Each source has a defined
// answer to its being gone ([Gone]).
//
// Health: a [Checker] checks every address at its interval, by TCP, HTTP or gRPC,
// spread so that many targets cost no burst, and turns the outcomes into a [State]
// by the rise and fall of the stream. It says "ready" only of a target that it saw
// ready lately: [Checker.Evaluate] takes a target whose last check is older than
// interval + timeout + 1 s for [Overdue], whatever hangs. An [OutageDetector] suspects
// the network instead of the targets when most of them fail at once.
//
// What all that means for a VIP is decided by the load balancer's composition.
// People see the targets in a [Index].
package target
