package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// Backoff is an exponential delay: each failure doubles it, from Min up to Max. It is not safe for
// concurrent use.
type Backoff struct {
	// Min and Max are the shortest and the longest delay; a Max below Min counts as Min.
	Min, Max time.Duration
	// Jitter is the fraction, 0 to 1, by which a delay varies at random in both directions, so that
	// the clients of a server do not retry in step.
	Jitter float64

	next time.Duration
}

// Next returns the delay after one more failure.
func (backoff *Backoff) Next() time.Duration {
	duration := max(backoff.next, backoff.Min)
	backoff.next = max(min(2*duration, backoff.Max), backoff.Min)
	return duration + time.Duration((2*rand.Float64()-1)*backoff.Jitter*float64(duration))
}

// Reset restarts with the shortest delay, after a success.
func (backoff *Backoff) Reset() { backoff.next = 0 }

// Wait sleeps for Next. It returns ctx's error when ctx ends first.
func (backoff *Backoff) Wait(ctx context.Context) error { return Sleep(ctx, backoff.Next()) }

// Sleep waits for duration. It returns ctx's error when ctx ends first.
func Sleep(ctx context.Context, duration time.Duration) error {
	select {
	case <-time.After(duration):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
