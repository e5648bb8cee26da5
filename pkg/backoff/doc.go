// Package backoff is the delay between attempts of an operation that fails.
package backoff
