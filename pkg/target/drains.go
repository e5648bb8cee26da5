package target

import (
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"
)

// DrainOrder is a drain by hand.
type DrainOrder struct {
	// At is when it was ordered, in wall time: it outlives the process.
	At time.Time
	// For is how long flows go on.
	For time.Duration
}

// Left returns how much of the drain is left. A clock that was set back or forward
// while the process was away makes it no longer than For and no shorter than 0.
func (o DrainOrder) Left(now time.Time) time.Duration {
	return min(max(0, o.For-now.Sub(o.At)), o.For)
}

// Drains are the drains by hand. They last until they are taken back, also across
// restarts when they have a file.
type Drains struct {
	path    string
	log     *slog.Logger
	changed chan struct{}

	mu     sync.Mutex
	orders map[ID]DrainOrder
}

var errNotYet = errors.New("not yet")

// OpenDrains reads the drains from the file; "" is none: they are kept in memory.
func OpenDrains(path string, log *slog.Logger) (*Drains, error) {
	return &Drains{path: path, log: log, changed: make(chan struct{}, 1), orders: map[ID]DrainOrder{}}, nil
}

// Changed wakes whoever calls [Drains.All]. Wake-ups conflate.
func (d *Drains) Changed() <-chan struct{} { return d.changed }

// Drain orders a drain and returns once that will survive a restart.
func (d *Drains) Drain(stream, name string, drainFor time.Duration, now time.Time) error {
	return errNotYet
}

// Undrain takes a drain back and tells whether there was one.
func (d *Drains) Undrain(stream, name string) (bool, error) { return false, errNotYet }

// All returns all drains.
func (d *Drains) All() map[ID]DrainOrder {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.orders)
}
