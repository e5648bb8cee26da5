// Package files reads files with bounded waits: neither a FIFO without a writer nor a mount whose
// server does not respond blocks the caller.
package files
