// Package kernel routes the traffic that comes from a VIP through the gateways.
//
// [Routing] owns one nftables table, `inet vipgate`, that marks every packet whose source is a
// configured VIP, forwarded or sent by this host, and a few policy rules per family that match the
// mark: the first looks up the table into which BIRD exports the gateways' routes, the next a table
// that contains only a blackhole route. So such a packet leaves through a gateway or is dropped,
// also while BIRD is down and while the frontend does not run: the state stays in the kernel until
// [Cleanup] or the end of the network namespace.
//
// Routing reconciles the kernel with the configured VIPs periodically, and as soon as the kernel
// reports a change. A VIP is confirmed only after its range was read back from the kernel and every
// rule that applies to it is installed.
//
// It also looks up where the kernel forwards packets from VIPs: the rules and routes of other
// processes may divert them. While they do, the VIPs of the family are not confirmed.
//
// It does not manage the routes in the gateways' table (BIRD does) and the sysctls. The external
// interface must not filter by strict reverse path (rp_filter 1): traffic to a VIP has no mark, so
// that the route back to its source is that of the main table; [Routing] warns about it. A socket
// of this host that is bound to a VIP needs a route to the destination in the main table as well,
// since the kernel looks up a first route before the mark can change it. It needs Linux 5.2 (inet
// chains of type route).
package kernel
