// Package endpoint runs the local gRPC endpoints of a process: the admin socket and the health
// port.
//
// New endpoints listen at once, so that a port or socket in use is an error at the start, and serve
// while their task runs. When the task ends, running calls get a short time to finish. The order of
// stopping determines the end of the mTLS endpoint of readiness, which is not one of these.
package endpoint
