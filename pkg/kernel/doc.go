// Package kernel routes traffic from VIPs through the gateways.
//
// [Routing] owns one nftables table, `inet vipgate`, that marks every forwarded or local packet
// whose source is a configured VIP. Policy rules in each family match the mark: the first looks
// up the table into which BIRD exports the gateways' routes, the next a table that contains only
// a blackhole route. So a marked packet leaves through a gateway or is dropped, even while BIRD
// or the frontend does not run: the state stays in the kernel until [Cleanup] or the end of the
// network namespace.
//
// Routing reconciles the kernel with the configured VIPs periodically, and as soon as the kernel
// reports a change. A VIP is confirmed only after its range was read back from the kernel and
// every rule that applies to it is installed.
//
// Rules and routes of other processes may divert packets from VIPs. Routing therefore looks up
// where the kernel forwards such packets. Until that ends, the family's VIPs are not confirmed.
//
// Routing manages neither the routes in the gateways' table, which BIRD exports, nor sysctls. The
// external interface must not use strict reverse path filtering (rp_filter 1): traffic to a VIP
// has no mark, so the kernel looks up the route back to its source in the main table; [Routing]
// warns about it. A local socket that is bound to a VIP also needs a route to the destination in
// the main table, since the kernel looks up a first route before the mark is set. The package
// requires Linux 5.2 (inet chains of type route).
package kernel
