// Package bird runs the BIRD routing daemon and observes its sessions.
//
// A [Supervisor] writes BIRD's configuration, starts BIRD as a child process, restarts it when it
// exits or hangs, and publishes the state of the gateway sessions. A line on BIRD's stderr only
// triggers a poll of `show protocols`, whose answer is authoritative. The configuration holds no
// route to a VIP: the announcer sends those over the loopback session, and BIRD drops them with it.
//
// Package gate decides which VIPs are announced. Facts about BIRD are in docs/bird.md; they were
// measured on 2.0.12 unless another version is named.
package bird
