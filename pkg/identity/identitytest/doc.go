// Package identitytest holds what tests of SPIFFE identities need: a certificate
// authority that signs whatever is asked, and a Workload API that speaks the real
// protocol and can be rotated, muted, stopped and started again.
package identitytest
