package gate

import (
	"slices"
	"time"
)

// Flap damping: the first rise is immediate; from the second flap within flapWindow on, a rise
// waits 1, 2, 4 … maxFlapWait.
const (
	flapWindow  = 60 * time.Second
	maxFlapWait = 30 * time.Second
	// maxFlaps is the number of flaps that reaches maxFlapWait.
	maxFlaps = 7
)

// flaps holds when a live load balancer changed a VIP from ready to not ready, oldest first.
type flaps []time.Time

// add adds a flap, in place: a VIP that flaps for a long time allocates nothing.
func (flaps flaps) add(now time.Time) flaps {
	expired := len(flaps) - len(flaps.recent(now))
	return append(slices.Delete(flaps, 0, max(expired, len(flaps)+1-maxFlaps)), now)
}

// recent returns the flaps within the window.
func (flaps flaps) recent(now time.Time) flaps {
	for len(flaps) > 0 && now.Sub(flaps[0]) > flapWindow {
		flaps = flaps[1:]
	}
	return flaps
}

// wait returns the delay of a rise at now.
func (flaps flaps) wait(now time.Time) time.Duration {
	n := len(flaps.recent(now))
	if n < 2 {
		return 0
	}
	return min(time.Second<<(n-2), maxFlapWait)
}
