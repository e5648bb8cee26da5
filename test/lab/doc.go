// Package lab is the network-namespace laboratory that tests, the demo and the
// benchmarks share: namespaces, the wires between them, and a look at the
// packets on a wire.
//
// A [Lab] is one trench pod with a gateway, for what is about announcements; a
// [Topology] has pods beside each other and targets with applications, for real
// traffic (package load makes it). Neither is safe for concurrent use.
//
// It needs root. A namespace's name carries the process that made it, so that
// what a killed run left behind is found and removed by the next one.
package lab
