// Package probe checks VIPs from a host beyond the gateways: over several source ports, so that the
// paths of ECMP are covered, with the checks of the streams. It knows what users can reach, and
// nothing of the trench pods.
//
// A path is one VIP, source address and source port. Its verdict holds for a limited time, like a
// lease: a path that could not be checked becomes unknown, neither reachable nor dead.
package probe
