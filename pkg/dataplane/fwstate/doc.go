// Package fwstate reads, writes and watches the forwarding state in the kernel: nftables objects,
// policy rules, routes, links and neighbors. It knows no policy: what to write when is decided by
// its callers.
package fwstate
