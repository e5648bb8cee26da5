// Package registry is the source of self-registered targets.
//
// A target is registered while its caller keeps a Register call of [Service] open, and for a grace
// period after the call. A [Registry] holds the registrations. It enforces a quota for each SPIFFE
// ID, and [Allowances], which authorize IDs to register targets of a stream. A state file preserves
// registrations across a restart for that period. No method waits for the network or the disk.
package registry
