// Package readiness transfers the readiness of VIPs from a load balancer to the frontend that
// advertises them, and the frontend's advertisements back.
//
// In the load balancer a [Table] holds the readiness of every VIP and orders its decisions. A
// [Decision] is one revision, or several if it is large; a revision is applied atomically. A
// [Server] streams the table to any number of watches. Each watch is a position in a shared log of
// the newest values. A reader that stops reading therefore costs one message of memory and delays
// neither the table nor other readers. The cost of a decision depends on the number of changed
// VIPs, not on the number of all VIPs.
//
// In the frontend a [Watcher] keeps a watch open across restarts of the load balancer and rotations
// of SVIDs, merges the received messages (newest wins), and reports the advertisements.
//
// Messages name VIPs in groups of equal state (docs/adr/0033-vips-in-groups.md).
//
// A watch is a lease. Every message carries its validity, counted from its receipt. Only
// [Table.Commit] and [Table.Heartbeat] renew the lease: when the loop of a load balancer hangs, no
// watch, whenever opened, receives messages. Package gate handles the expiry of the lease.
package readiness
