// Package turn lets the pods of a trench take turns at changes that reset the session of the only
// gateway of a family, so that the VIPs stay at the gateway through the remaining pods.
//
// A pod holds a Lease from before it writes the change until its frontend has applied it, the
// sessions that were up are up again, and their VIPs are exported. A pod whose session does not
// come back keeps the Lease for [timing.hold], so that a wrong change of a Trench reaches one pod
// before an operator can correct it. The Lease of a pod that hangs expires.
//
// Without an answer of the API server about the Lease, a pod waits for a delay that depends on its
// name.
package turn
