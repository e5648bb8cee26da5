// Package healthcheck checks targets by TCP, HTTP or gRPC, and turns the outcomes into
// a [State] by the rise and fall of their stream.
//
// A [Checker] checks each address at its interval, spread over time, so that many
// targets cause no burst of packets. A target is [Ready] only while its newest check is
// recent: [Checker.Evaluate] reports a target whose last check is older than
// interval + timeout + 1 s as [Overdue], even if a check or the checker hangs. Evaluate
// is called by one goroutine, its cost follows the changes, and no method waits for a
// check.
//
// A check that has no source address gives no verdict. A failure without any answer is
// marked as [Health.Silent], which package outage needs to tell a lost network from
// failed targets.
package healthcheck
