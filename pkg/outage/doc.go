// Package outage suspects the network of the targets instead of the targets when most of them fail
// at once. [Detector] is a pure function of check results: no clock, no goroutine, no I/O.
package outage
