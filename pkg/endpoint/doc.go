// Package endpoint runs the local gRPC endpoints of a process: the admin socket and the health
// port.
//
// New endpoints listen at once, so that a port or socket in use is an error at the start, and serve
// while their task runs. When the task ends, running calls get a short time to finish.
package endpoint
