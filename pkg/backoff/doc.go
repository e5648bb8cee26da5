// Package backoff computes exponential delays between the attempts of a failing operation.
package backoff
