// Package fwstate reads, writes and watches the forwarding state in the kernel: nftables objects,
// policy rules, routes, links and neighbors. It contains no policy: its callers decide when to
// write which state.
package fwstate
