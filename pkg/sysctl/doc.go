// Package sysctl reads kernel parameters of the network namespace of the calling thread, and
// returns the command that sets one.
package sysctl
