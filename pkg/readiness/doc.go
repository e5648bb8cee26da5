// Package readiness transfers the readiness of VIPs from a load balancer to the frontend that
// advertises them, and the frontend's advertisements back.
//
// In the load balancer a [Table] holds the readiness of every VIP and orders its decisions: one
// [Decision] is one revision and is applied atomically. A [Server] streams the table to any number
// of watches. A reader that stops reading costs one message of memory and delays neither the table
// nor other readers: each watch is a position in one log of the newest values. The cost of a
// decision depends on what changed, not on the number of VIPs.
//
// In the frontend a [Watcher] keeps a watch open across restarts of the load balancer and rotations
// of SVIDs, merges the received messages (newest wins), and reports the advertisements.
//
// Messages are protobuf. The VIPs in them are encoded and decoded without a Go value for each
// (docs/adr/0033-vips-without-messages.md).
//
// A watch is a lease. Every message carries its validity, counted from its receipt. Only
// [Table.Commit] and [Table.Heartbeat] renew it: when the loop of a load balancer hangs, all watches
// fall silent, also those opened later. Package gate decides what follows the end of the lease.
package readiness
