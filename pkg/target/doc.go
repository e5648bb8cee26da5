// Package target knows the targets of the streams and checks their health.
//
// A [Checker] opens a TCP connection to every target at its interval, spread
// so that many targets cost no burst, and turns the outcomes into a [State] by
// the rise and fall of the stream. It says "ready" only of a target that it
// saw ready lately: [Checker.Evaluate] takes a target whose last check is
// older than interval + timeout + 1 s for [Overdue], whatever hangs.
//
// What a target's state means for a VIP is decided by the load balancer's
// composition; where targets come from is told to [Checker.Configure].
package target
