// Package fwstate is the kernel connection of the data plane: it reads, writes and watches
// forwarding state, which is one nftables table, policy rules, routes, neighbors and
// connection tracking entries.
package fwstate
