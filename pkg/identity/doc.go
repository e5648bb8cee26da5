// Package identity authenticates this process and its peers with X.509-SVIDs.
//
// A [Source] holds the SVID of this process and the trust bundle, renewed from one of three
// origins: the SPIFFE Workload API, a directory of files, or a development authority for one
// machine. It retries indefinitely: without a usable SVID, its [Status] contains the error. The
// last SVID stays in use until its NotAfter.
//
// [NewCredentials] returns gRPC credentials: TLS 1.3 only, mutual, never resumed, verified
// against exact SPIFFE IDs, and closed at the earlier NotAfter of the two leaf certificates. A
// server logs each rejection with its reason, because a TLS 1.3 client does not receive it.
//
// On one host, [NewPeerCredentials] replaces the SVID: the kernel reports the user of a peer on a unix
// socket, and credentials authorize it by the ID that [UserID] gives that user.
//
// [Listen] creates unix sockets that are never more accessible than requested, and [AdminGuard]
// accepts only processes of the same user or root.
//
// The caller decides on the expected IDs, roles of peers, and consequences of a missing SVID.
package identity
