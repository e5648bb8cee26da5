// Package feedback takes the verdicts of probes beyond the gateways, and finds the VIPs that they
// cannot reach through this pod.
//
// A probe knows which of its paths are dead, but not to which pod a router sends them. The pod sees
// the packets of the paths that lead to it: a verdict counts here only for these paths.
//
// Invariants:
//   - A VIP is suspected only while leases of at least Quorum probes hold. A probe whose lease
//     ended is absent, and its verdicts are forgotten.
//   - It becomes suspected once Quorum probes have at least one path to it through this pod, and
//     all these paths are dead.
//   - It remains suspected for a wait after the last such verdict, because routers may send its
//     paths to other pods. The wait doubles with each suspicion, from 10 s to 5 min.
package feedback
