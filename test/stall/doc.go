// Package stall stops servers as SIGSTOP does, within one process: connections stay open and are
// accepted by the kernel, and no byte is read or written.
package stall
