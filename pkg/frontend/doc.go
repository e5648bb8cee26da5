// Package frontend is the frontend's process: it watches the load balancer and
// the gateway sessions of BIRD, and advertises a VIP only while both are up.
//
// It guarantees that nothing in the way "input → gate → announcer" waits for
// anything outside it, that every transition of a VIP is logged and kept with
// its cause, and that a stop moves traffic away before anything is torn down.
// The decision itself is the matter of pkg/gate; sessions are of pkg/bird, the
// way of a decision to BIRD of pkg/announce, source routing of pkg/kernel.
package frontend
