package drains

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Drain is one drain. Its times are on the monotonic clock.
type Drain struct {
	// End is the end of the drain time, after which no traffic is served.
	End time.Time
	// Over is when the drain ends by itself; zero if it lasts until it is undrained.
	Over time.Time
}

// Drains holds the drains by operators. With a file they survive restarts. K names the drained
// object and must encode and decode itself as text. The methods are safe for concurrent use; Drain
// and Undrain wait for the disk.
type Drains[K comparable] struct {
	path    string
	changed chan struct{}

	writing sync.Mutex // held from the change to the end of its write
	orders  latest.Value[map[K]order]
}

const version = 2

// document is the content of the file.
type document[K comparable] struct {
	Version int         `json:"version"`
	Drains  map[K]order `json:"drains"`
}

// order is one drain in the file.
type order struct {
	// At is in wall time, since it outlives the process.
	At  time.Time        `json:"at"`
	For durable.Duration `json:"for"`
	// Lasts is the time from At until the drain ends by itself; 0 if it does not.
	Lasts durable.Duration `json:"lasts,omitempty"`
	// drain is determined once, so that a wall clock that jumps later moves nothing.
	drain Drain
}

// Open reads the drains from the file; "" keeps them in memory. A corrupt file, or one of another
// version, is moved aside and logged, and the list of drains starts empty: the objects receive
// traffic, but without a start nothing would. A file that cannot be read now is an error.
func Open[K comparable](path string, log *slog.Logger) (*Drains[K], error) {
	drains := &Drains[K]{path: path, changed: make(chan struct{}, 1)}
	if path == "" {
		return drains, nil
	}
	var content document[K]
	now := time.Now()
	_, found, err := durable.Read(path, &content)
	if err == nil && found && content.Version != version {
		err = fmt.Errorf("%s %w: version %d is not %d", path, durable.ErrCorrupt, content.Version, version)
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		durable.SetAside(path, err, now, log)
		return drains, nil
	case err != nil:
		return nil, fmt.Errorf("drains by an operator: %w", err)
	}
	orders := make(map[K]order, len(content.Drains))
	for key, o := range content.Drains {
		o.drain.End = now.Add(remaining(o.At, time.Duration(o.For), now))
		if o.Lasts > 0 {
			left := remaining(o.At, time.Duration(o.Lasts), now)
			if left == 0 {
				continue // it ended while no process ran
			}
			o.drain.Over = now.Add(left)
		}
		orders[key] = o
	}
	if len(orders) > 0 {
		drains.orders.Set(orders)
		latest.Wake(drains.changed)
	}
	return drains, nil
}

// remaining returns the rest of a time that began at a wall time. It is between 0 and length, even
// if the clock was set while no process ran.
func remaining(at time.Time, length time.Duration, now time.Time) time.Duration {
	return min(max(0, length-now.Round(0).Sub(at)), length)
}

// Changed wakes the caller of [Drains.All]. Wake-ups conflate.
func (drains *Drains[K]) Changed() <-chan struct{} { return drains.changed }

// New returns a drain with a drain time, which ends by itself after lasts, unless that is 0.
func New(now time.Time, length, lasts time.Duration) Drain {
	drain := Drain{End: now.Add(length)}
	if lasts > 0 {
		drain.Over = now.Add(lasts)
	}
	return drain
}

// Drain orders drains, or orders them again, and returns once they will survive a restart. After an
// error nothing has changed in this process.
func (drains *Drains[K]) Drain(now time.Time, added map[K]Drain) error {
	return drains.change(now, func(orders map[K]order) {
		for key, drain := range added {
			// Round strips the monotonic clock reading, which has no meaning after a restart.
			o := order{At: now.Round(0), For: durable.Duration(max(0, drain.End.Sub(now))), drain: drain}
			if !drain.Over.IsZero() {
				o.Lasts = durable.Duration(max(1, drain.Over.Sub(now)))
			}
			orders[key] = o
		}
	})
}

// Undrain removes drains, if they exist, and returns once that will survive a restart. After an
// error nothing has changed.
func (drains *Drains[K]) Undrain(now time.Time, keys ...K) error {
	return drains.change(now, func(orders map[K]order) {
		for _, key := range keys {
			delete(orders, key)
		}
	})
}

// All returns the drains in effect at now, and when the next one ends by itself; zero for never.
func (drains *Drains[K]) All(now time.Time) (all map[K]Drain, next time.Time) {
	orders := drains.orders.Load()
	all = make(map[K]Drain, len(orders))
	for key, o := range orders {
		over := o.drain.Over
		if !over.IsZero() && !over.After(now) {
			continue
		}
		all[key] = o.drain
		if !over.IsZero() && (next.IsZero() || over.Before(next)) {
			next = over
		}
	}
	return all, next
}

// change writes the drains as f changes them, and then applies them.
func (drains *Drains[K]) change(now time.Time, f func(map[K]order)) error {
	drains.writing.Lock()
	defer drains.writing.Unlock()
	// All iterates over the current map without a lock, so change a copy, without ended drains.
	orders := map[K]order{}
	for key, o := range drains.orders.Load() {
		if o.drain.Over.IsZero() || o.drain.Over.After(now) {
			orders[key] = o
		}
	}
	f(orders)
	if drains.path != "" {
		// Write first: a drain that is in effect must survive a restart.
		if err := durable.Write(drains.path, document[K]{version, orders}); err != nil {
			return fmt.Errorf("drains by an operator: %w", err)
		}
	}
	drains.orders.Set(orders)
	latest.Wake(drains.changed)
	return nil
}
