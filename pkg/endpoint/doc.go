// Package endpoint runs the local gRPC endpoints of a process: its admin socket and health port.
//
// The constructors listen, so that a port or socket in use is an error at the start. Endpoints
// serve while their task runs. When the task ends, running calls have a short time to finish.
package endpoint
