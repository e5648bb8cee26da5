// Package dataplane forwards the packets of VIPs to targets, in the kernel: nftables
// picks a target by a Maglev table and marks the packet, and policy routing takes it
// there. See docs/dataplane.md.
package dataplane
