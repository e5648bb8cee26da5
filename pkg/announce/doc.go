// Package announce tells one BGP peer, the BIRD beside us on the loopback,
// which VIPs to advertise.
//
// An [Announcer] guarantees:
//
//   - The peer holds exactly what was posted, and only while our process lives:
//     the session's end, or its hold time when we hang, takes everything back.
//     Graceful restart is never offered.
//   - What the gate posts in one [Announcer.Post] leaves in one write, without
//     waiting for anything but the socket; its cost depends on the number of
//     changes, not on the number of VIPs.
//   - It speaks only for a gate that lives: without an [Announcer.Beat] younger
//     than [MaxBeatAge] it neither connects, nor sends KEEPALIVE, nor announces
//     its table to a new session. A hung gate cannot be re-announced.
//   - After every (re)connection the peer is told the newest table, whole.
//
// The announcer never listens, so sessions cannot collide, and it takes no
// routes. What to announce is decided elsewhere, and whether gateways have it
// is BIRD's to tell.
package announce
