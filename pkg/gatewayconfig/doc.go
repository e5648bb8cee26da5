// Package gatewayconfig renders the router's side of the gateways in a trench file: sessions, BFD,
// filters that accept exactly the VIPs, and limits. The text of FRR, BIRD and GoBGP is a complete
// configuration of the daemon. It never contains a password, only the path of the file with it. The
// package does no I/O.
package gatewayconfig
