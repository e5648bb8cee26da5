// Package files reads files with bounded waits: a FIFO without a writer or a mount whose server
// does not respond cannot block it.
package files
