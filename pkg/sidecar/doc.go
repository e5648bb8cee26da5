// Package sidecar implements the program target: it keeps the kernel state of package replypath
// complete, and serves its health, status and metrics.
package sidecar
