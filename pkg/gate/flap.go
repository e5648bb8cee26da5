package gate

import "time"

// Flap damping (design section 5): the first rise is free, after the second
// flap within flapWindow a rise waits 1, 2, 4 … maxFlapWait.
const (
	flapWindow  = 60 * time.Second
	maxFlapWait = 30 * time.Second
	// keptFlaps is how many flaps it takes to reach maxFlapWait.
	keptFlaps = 7
)

// flaps remembers when a VIP fell while the load balancer was live, oldest first.
type flaps []time.Time

// fell adds a flap.
func (f flaps) fell(now time.Time) flaps {
	f = append(f.recent(now), now)
	if len(f) > keptFlaps {
		f = f[len(f)-keptFlaps:]
	}
	return f
}

// recent drops what is older than the window.
func (f flaps) recent(now time.Time) flaps {
	for len(f) > 0 && now.Sub(f[0]) > flapWindow {
		f = f[1:]
	}
	return f
}

// wait is how long a rise at now has to wait.
func (f flaps) wait(now time.Time) time.Duration {
	n := len(f.recent(now))
	if n < 2 {
		return 0
	}
	return min(time.Second<<(n-2), maxFlapWait)
}
