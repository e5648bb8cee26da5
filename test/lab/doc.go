// Package lab is the network-namespace laboratory that tests, the demo and the
// benchmarks share: namespaces, the wires between them, and a look at the
// packets on a wire.
//
// It needs root. A namespace's name carries the process that made it, so that
// what a killed run left behind is found and removed by the next one.
package lab
