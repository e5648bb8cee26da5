// Package bfdlease permits BFD packets to static gateways only while the frontend attracts traffic.
// The permission is a lease in the kernel, which expires when the frontend dies or hangs.
//
// A static gateway follows a BFD session, which BIRD keeps up as long as BIRD runs. [Lease] owns
// one nftables table, `inet vipgate-bfd`, whose output chain drops BFD control packets (UDP port
// 3784, RFC 5881) to static gateways unless the set `attract` contains the packet's address
// family. An element of the set expires after [Timeout]. Each [Interval] a packet to localhost
// that carries a secret refreshes the element, and the matching rule drops the packet. So the
// kernel, not a process, ends the session of a frontend that was killed or stopped. Packets from
// gateways pass: the gateway signals that its session is down, BIRD's session follows, and that
// confirms the withdrawal.
//
// Guarantees: after [Lease.Gateways] returns nil, no BFD control packet leaves to the gateways
// without an order younger than Timeout + 1 s. Each write replaces the content of the table in
// one transaction, and a change by another process is repaired within Interval. Other BFD
// sessions are not affected. The package requires Linux 5.2.
package bfdlease
