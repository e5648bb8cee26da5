// Package identitytest is the test kit for SPIFFE identities: a certificate authority that signs
// any request, and a Workload API server that can be rotated, muted, stopped and restarted.
package identitytest
