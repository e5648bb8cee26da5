// Package stall stops servers within one process, with the effect of SIGSTOP: connections stay
// open and are accepted by the kernel, and no byte is read or written.
package stall
