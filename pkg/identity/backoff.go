package identity

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

// The back-off between two attempts.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = 2 * time.Second
)

// backoff doubles the wait between two attempts from minBackoff to maxBackoff, ± 10 %. It serves
// one goroutine.
type backoff struct{ next time.Duration }

var _ workloadapi.BackoffStrategy = (*backoff)(nil)

// NewBackoff returns b itself: a new watch continues the back-off.
func (b *backoff) NewBackoff() workloadapi.Backoff { return b }

// Next returns the delay before the next attempt.
func (b *backoff) Next() time.Duration {
	d := max(b.next, minBackoff)
	b.next = min(2*d, maxBackoff)
	return d + time.Duration((rand.Float64()-0.5)/5*float64(d))
}

// Reset restarts with the shortest delay, after a successful attempt.
func (b *backoff) Reset() { b.next = 0 }

// sleep waits, or returns ctx's error when that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
