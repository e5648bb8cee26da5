// Package replypath configures the kernel of a host as a target of a trench. The host accepts
// packets to the VIP pool, does not answer ARP for it, and sends each reply to the source
// link-layer address of the flow's newest packet, which is a trench pod's.
//
// The state exists only in the kernel and survives the process. A [Path] reconciles it: it restores
// objects that another process removes, and completes the state of an earlier process at the start.
// docs/adr/0026-reply-to-the-link-address.md records the decision and the measurements.
package replypath
