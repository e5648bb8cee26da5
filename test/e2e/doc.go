// Package e2e holds the end-to-end tests: real processes, BIRD at both ends of a veth link, TCP
// targets and mTLS, checked against the routes of the gateway. They need root.
package e2e
