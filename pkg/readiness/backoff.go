package readiness

import (
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/backoff"
)

// Back-off of connection attempts (design, section 4).
const (
	minBackoff = 50 * time.Millisecond
	// DefaultMaxBackoff is the longest wait between two attempts to reach the
	// load balancer.
	DefaultMaxBackoff = 2 * time.Second

	backoffFactor = 1.6
	backoffJitter = 0.2
)

// pause counts failures in a row and says how long to wait after each.
type pause struct {
	max  time.Duration
	next time.Duration
}

// after returns the wait after one more failure.
func (p *pause) after() time.Duration {
	d := min(max(p.next, minBackoff), max(p.max, minBackoff))
	p.next = time.Duration(float64(d) * backoffFactor)
	return time.Duration(float64(d) * (1 - backoffJitter + 2*backoffJitter*rand.Float64()))
}

// reset makes the next wait the shortest.
func (p *pause) reset() { p.next = 0 }

// grpcBackoff is the same for gRPC's own attempts. They hardly happen: a Watcher
// gives up a connection at its first failure and makes a new one.
func grpcBackoff(longest time.Duration) backoff.Config {
	return backoff.Config{BaseDelay: minBackoff, Multiplier: backoffFactor, Jitter: backoffJitter, MaxDelay: longest}
}
