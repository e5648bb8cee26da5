package readiness

import (
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/backoff"
)

// Back-off of connection attempts.
const (
	minBackoff = 50 * time.Millisecond
	// DefaultMaxBackoff is the longest delay between two connection attempts.
	DefaultMaxBackoff = 2 * time.Second

	backoffFactor = 1.6
	backoffJitter = 0.2
)

// retryDelay is an exponential back-off with jitter.
type retryDelay struct {
	max   time.Duration
	delay time.Duration
}

// next returns the delay after one more failure.
func (p *retryDelay) next() time.Duration {
	d := min(max(p.delay, minBackoff), max(p.max, minBackoff))
	p.delay = time.Duration(float64(d) * backoffFactor)
	return time.Duration(float64(d) * (1 - backoffJitter + 2*backoffJitter*rand.Float64()))
}

// reset restarts with the shortest delay.
func (p *retryDelay) reset() { p.delay = 0 }

// grpcBackoff is the back-off of gRPC's own attempts. It is rarely used: a Watcher closes a
// connection at its first failure and creates a new one.
func grpcBackoff(longest time.Duration) backoff.Config {
	return backoff.Config{BaseDelay: minBackoff, Multiplier: backoffFactor, Jitter: backoffJitter, MaxDelay: longest}
}
