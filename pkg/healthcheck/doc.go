// Package healthcheck checks targets by TCP, HTTP, gRPC, UDP, DNS, NTP or SCTP, and derives the
// [State] of each from the rise and fall of its stream.
//
// A [Checker] checks each address at its interval, spread over time, so that many targets cause no
// burst of packets. A target is [Ready] only while its newest check is recent: [Checker.Evaluate]
// reports a target whose last check is older than interval + timeout + 1 s as [Overdue], even if a
// check or the checker hangs. Evaluate is called by one goroutine, its cost follows the changes,
// and no method waits for a check.
//
// With a data plane a check takes the path of traffic: with the fwmark of the target to a VIP of the
// stream ([trench.Via]). Why a VIP does not answer is diagnosed apart from the checks.
//
// A check that has no source address, or no fwmark yet, gives no verdict.
//
// A new kind of check is a field of [trench.Check], a file probe_*.go, and a case in newPlan; over
// datagrams, also in newQuery.
package healthcheck
