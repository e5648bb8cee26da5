// Package bfdlease lets the BFD packets of static gateways leave only while the frontend wants to
// attract traffic, and takes that back by itself when the frontend dies or hangs.
//
// A static gateway follows a BFD session, which BIRD keeps up as long as BIRD runs. [Lease] owns
// one nftables table, `inet vipgate-bfd`, whose output chain drops BFD control packets (UDP port
// 3784, RFC 5881) to the addresses of static gateways unless the set `attract` has the packet's
// address family. An element of that set expires after [Timeout] and is refreshed each [Interval],
// by a packet to localhost that carries a secret and that a rule drops; so the kernel, not a
// process, ends the session of a frontend that was killed or stopped. Packets from gateways pass:
// the session in BIRD goes down because the gateway signals that it is down, which confirms the
// withdrawal.
//
// Guarantees: once [Lease.Gateways] has returned without an error, no packet leaves to those
// gateways without an order that is younger than Timeout + 1 s. The table is written as a whole, in
// one transaction, whenever something changed: a change of another process is repaired within
// Interval. Other BFD sessions are not affected. It needs Linux 5.2.
package bfdlease
