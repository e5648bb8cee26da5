// Package outage detects outages of the target network from simultaneous failures of most
// targets. [Detector] is a pure function of check results: it has no clock, starts no goroutine,
// does no I/O.
package outage
