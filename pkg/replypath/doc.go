// Package replypath makes a host a target of a trench, in its kernel: it accepts packets to the
// VIP pool, does not answer ARP for it, and sends each reply to the link address from which the
// newest packet of the flow came, which is that of a trench pod.
//
// The state is in the kernel alone and survives the process. A [Path] reconciles it: what another
// process removes is restored, and a start finds and completes what an earlier process left.
// docs/adr/0026-reply-to-the-link-address.md has the decision and its numbers.
package replypath
