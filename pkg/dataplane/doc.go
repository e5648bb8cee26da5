// Package dataplane forwards the packets of VIPs to targets, in the kernel: nftables
// picks a target by a Maglev table and sets its fwmark, and policy routing sends the
// packet to it. See docs/dataplane.md.
//
// The package holds the reconciler, which compares desired with observed state and applies the
// difference. Package plan computes that difference without I/O; package fwstate reads, writes and
// watches the kernel. What happens when another process changes the data plane is in repair.go.
package dataplane
