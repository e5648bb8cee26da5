// Package midstream finds the target of TCP flows whose first packet this pod did not see: gateways
// moved the flow here from another pod, which had chosen the target by an earlier set of targets.
// Without connection tracking, it does so for all flows.
//
// Two tables, ip and ip6, copy a packet of such a flow to the target of its hash in earlier sets,
// while the current target gets the packet itself. The RST of a target that does not have the flow
// is dropped; the target that sends data has the flow, and gets its connection mark. Without
// connection tracking, the current target returns the packet first (package returning). ADR 45 has
// the reasons. "dup" does not exist in the family inet, so the rules cannot be in the table of
// package fwstate, which they do not change: without these tables, forwarding is as it was.
package midstream
