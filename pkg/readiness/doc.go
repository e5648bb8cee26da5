// Package readiness carries what a load balancer knows about its VIPs to the
// frontend that advertises them, and carries back what the frontend advertises.
//
// In the load balancer a [Table] holds the readiness of every VIP and orders
// its decisions: one [Decision] is one revision, applied whole. A [Server]
// streams the table to any number of watches. A reader that stops reading costs
// no memory beyond one message and delays neither the table nor other readers:
// the table keeps one log of the newest values, of the order of the number of
// VIPs, and every watch is only a place in it. The cost of a decision depends
// on what changed, never on how many VIPs exist.
//
// In the frontend a [Watcher] keeps a watch open, across restarts of the load
// balancer and rotations of SVIDs, and merges what it hears so that the newest
// wins. It also reports what the frontend advertises.
//
// A watch is a lease. Every message says how long it stays valid, counted from
// its receipt. The table vouches only for as long as its owner commits or beats
// ([Table.Commit], [Table.Heartbeat]): a load balancer whose loop hangs falls
// silent on all watches, also on those opened later. Whether a lease has ended,
// and what follows from it, is judged elsewhere; the Watcher says when it ends.
//
// Who the peer is and whether the connection may exist is decided by the
// transport credentials, which are handed in.
package readiness
