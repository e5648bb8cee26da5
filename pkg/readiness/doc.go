// Package readiness transfers the readiness of VIPs from a load balancer to the frontend that
// advertises them, and the frontend's advertisements back.
//
// In the load balancer a [Table] holds the readiness of every VIP and orders its decisions: one
// [Decision] is one revision and is applied atomically. A [Server] streams the table to any number
// of watches. A reader that stops reading costs no memory beyond one message and delays neither the
// table nor other readers: the table keeps one log of the newest values, of the order of the number
// of VIPs, and each watch is a position in it. The cost of a decision depends on what changed, not
// on the number of VIPs.
//
// In the frontend a [Watcher] keeps a watch open across restarts of the load balancer and rotations
// of SVIDs, merges the received messages (newest wins), and reports the advertisements.
//
// A watch is a lease. Every message carries its validity, counted from its receipt. The lease is
// renewed only while the owner of the table commits or sends heartbeats ([Table.Commit],
// [Table.Heartbeat]): when the loop of a load balancer hangs, all watches fall silent, also those
// opened later. The Watcher reports the end of the lease; package gate decides what follows.
//
// Authentication and authorization of the peer are the task of the transport credentials that the
// caller supplies.
package readiness
