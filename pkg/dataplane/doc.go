// Package dataplane programs the kernel to forward packets of VIPs to targets: nftables
// selects a target from a Maglev table and sets its fwmark, and policy routing forwards the
// packet to the target. See docs/dataplane.md.
//
// The package contains the reconciler, which compares desired with observed state and applies the
// difference. Package plan computes the difference without I/O; package fwstate reads, writes and
// watches the kernel. repair.go documents the repair of changes by other processes.
package dataplane
