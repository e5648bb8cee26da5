// Package kernel keeps the traffic that comes from a VIP on the way through the gateways.
//
// [Routing] owns one nftables table, `inet vipgate`, that marks every packet whose source is a
// configured VIP, forwarded or sent by this host, and a few policy rules per family that act on the
// mark: first the table into which BIRD exports the gateways' routes, then a table with nothing but
// a blackhole. So such a packet leaves through a gateway or not at all, also while BIRD is down and
// while no process of ours runs: the state stays in the kernel until [Cleanup] or the end of the
// network namespace.
//
// A VIP is confirmed only after its range was read back from the kernel and every rule that acts on
// it stands. Routing looks again every few seconds, and as soon as the kernel reports a change, and
// mends what is missing.
//
// What it leaves to others: the routes in the gateways' table (BIRD); the sysctls. The external
// interface must not filter by strict reverse path (rp_filter 1): traffic to a VIP carries no mark,
// so that the way back seems to lie elsewhere; [Routing] warns about it. A socket of this host that
// is bound to a VIP needs some route to the destination in the main table as well, since the kernel
// wants a first route before the mark can change it. It needs Linux 5.2 (inet chains of type
// route).
package kernel
