// Package endpoint runs the local gRPC endpoints of a process: the admin socket
// and the health port.
//
// An [Endpoint] listens as soon as it is created, so that a busy port or socket is
// an error at the start, and serves while its task runs. When the task ends,
// calls that run get a moment to finish. The mTLS endpoint, whose end is a
// matter of the process's order of stopping, is not one of these.
package endpoint
