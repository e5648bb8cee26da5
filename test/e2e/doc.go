// Package e2e holds the end-to-end tests: real processes, real BIRD on both
// sides of a real wire, real TCP targets, real mTLS, checked against what the gateway
// sees. They need root.
package e2e
