// Package registry is the source of the targets that register themselves.
//
// A target is registered for as long as its caller keeps a Register call of [Service] open, and for
// a grace period after that. A [Registry] holds the registrations, with a quota for each SPIFFE ID
// and [Allowances] of which ID may register targets of which stream. Its state file lets
// registrations survive a restart for their grace period. No method waits for the network or the
// disk.
package registry
