// Package identity says who we are and makes sure of who the peer is.
//
// A [Source] holds our own X.509-SVID and the trust bundle, kept fresh from one
// of three origins: the SPIFFE Workload API, a directory of files, or a
// development authority for one machine. It never gives up: while there is no
// usable SVID its [Status] says why, and the last SVID stays in use until its
// NotAfter.
//
// [ServerCredentials] and [ClientCredentials] make gRPC connections of it that
// are TLS 1.3 only and mutual, never resumed, checked against exact SPIFFE IDs,
// and ended at the earlier NotAfter of the two leaf certificates. Each refusal is
// logged with its reason, because a TLS 1.3 client learns nothing of it.
//
// [Listen] makes unix sockets that are at no moment more open than asked, and
// [AdminCredentials] lets only the same user or root use one.
//
// What a peer may do once it is in (the roles behind the IDs), which IDs are
// expected, and what follows from a missing SVID is left to the caller.
package identity
