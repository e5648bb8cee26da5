// Package outage suspects the network of the targets instead of the targets when most
// of them fail at once.
//
// [Detector] is a pure function of check results: no clock, no goroutine, no I/O. When
// more than the configured [Percent] of all targets, and at least 10 addresses, stop
// answering within one check interval, it reports an outage, and either holds the failed
// targets ready or only marks them as suspected. Every hold is bounded: by the outage
// itself, and by one check interval before and after it.
package outage
