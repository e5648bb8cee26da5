// Package announce advertises VIPs to one BGP peer: the local BIRD on the loopback, or a speaker that
// another program runs.
//
// An [Announcer] guarantees:
//
//   - The peer holds exactly the posted VIPs, and only while this process lives: the end of the
//     session, or the hold time if the process hangs, withdraws everything. Graceful restart is
//     never offered.
//   - [Announcer.Post] sends a decision in one nonblocking write; the session's goroutine writes
//     the bytes that do not fit the socket buffer. The cost depends on the number of changes, not
//     on the number of VIPs.
//   - Announcements need a live gate: without an [Announcer.Heartbeat] younger than
//     [MaxHeartbeatAge] the announcer neither connects, nor sends KEEPALIVE, nor announces its
//     table to a new session. The VIPs of a hung gate are not announced again.
//   - Every new session sends the whole current table to the peer.
//
// The announcer either connects or listens, so sessions cannot collide, and it ignores received
// routes. Package gate decides what to announce, and BIRD reports whether gateways have it.
package announce
