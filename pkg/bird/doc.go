// Package bird runs the BIRD routing daemon and knows its sessions.
//
// A [Supervisor] writes BIRD's configuration, starts it as a child, restarts it
// when it ends or hangs, and publishes the state of the gateway sessions. A
// line on BIRD's stderr is a hint to look at once; what `show protocols` says is
// the truth. The configuration holds no route to a VIP: those come over the
// loopback session and leave with it.
//
// Which VIPs are announced, and what follows from the state of the sessions, is
// decided elsewhere. What was measured about BIRD stands where it is used; the
// measurements are of 2.0.12 unless said otherwise.
package bird
