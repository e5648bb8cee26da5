package targetset

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/durable"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Drains holds the drains by operators. A drain lasts until it is undrained, and with a file also
// across restarts. The methods are safe for concurrent use; Drain and Undrain wait for the disk.
type Drains struct {
	path    string
	changed chan struct{}

	writing sync.Mutex // held from the change to the end of its write
	orders  latest.Value[map[ID]order]
}

// drainsVersion is the version of the format of the file.
const drainsVersion = 1

// drainDocument is the content of the file.
type drainDocument struct {
	Version int     `json:"version"`
	Drains  []order `json:"drains"`
}

// order is one drain.
type order struct {
	ID
	// At is in wall time, since it outlives the process.
	At  time.Time        `json:"at"`
	For durable.Duration `json:"for"`
	// end is on the monotonic clock and determined once, so that a wall clock that jumps later
	// moves nothing.
	end time.Time
}

// OpenDrains reads the drains from the file; "" keeps them in memory. A corrupt file is moved aside
// and logged, and the list of drains starts empty. A file that cannot be read is an error: without
// it targets that an operator drained would receive flows.
func OpenDrains(path string, log *slog.Logger) (*Drains, error) {
	drains := &Drains{path: path, changed: make(chan struct{}, 1)}
	if path == "" {
		return drains, nil
	}
	var document drainDocument
	now := time.Now()
	_, found, err := durable.Read(path, &document)
	if err == nil && found && document.Version != drainsVersion {
		err = fmt.Errorf("%s %w: version %d is not %d", path, durable.ErrCorrupt, document.Version, drainsVersion)
	}
	orders := make(map[ID]order, len(document.Drains))
	for i, o := range document.Drains {
		if errID := o.ID.Check(); err == nil && errID != nil {
			err = fmt.Errorf("%s %w: drain %d: %w", path, durable.ErrCorrupt, i, errID)
		}
		// From here the monotonic clock counts, so that a change of the wall clock has no effect.
		o.end = now.Add(remaining(o.At, time.Duration(o.For), now))
		orders[o.ID] = o
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		durable.SetAside(path, err, now, log)
	case err != nil:
		return nil, fmt.Errorf("drains by an operator: %w", err)
	case len(orders) > 0:
		drains.orders.Set(orders)
		latest.Wake(drains.changed)
	}
	return drains, nil
}

// remaining returns the rest of a drain that was ordered at a wall time. It is between 0 and
// length, even if the clock was set while no process ran.
func remaining(at time.Time, length time.Duration, now time.Time) time.Duration {
	return min(max(0, length-now.Round(0).Sub(at)), length)
}

// Changed wakes the caller of [Drains.All]. Wake-ups conflate.
func (drains *Drains) Changed() <-chan struct{} { return drains.changed }

// Drain orders a drain, or orders it again, and returns once it will survive a restart. After an
// error nothing has changed in this process.
func (drains *Drains) Drain(id ID, length time.Duration, now time.Time) error {
	if err := id.Check(); err != nil {
		return err
	}
	if length < 0 {
		return fmt.Errorf("%v is negative", length)
	}
	return drains.change(func(orders map[ID]order) {
		// Round strips the monotonic clock reading, which has no meaning after a restart.
		orders[id] = order{ID: id, At: now.Round(0), For: durable.Duration(length), end: now.Add(length)}
	})
}

// Undrain removes a drain, if there is one, and returns once that will survive a restart. After an
// error nothing has changed.
func (drains *Drains) Undrain(id ID) error {
	return drains.change(func(orders map[ID]order) { delete(orders, id) })
}

// All returns when each drain ends, on the monotonic clock.
func (drains *Drains) All() map[ID]time.Time {
	orders := drains.orders.Load()
	ends := make(map[ID]time.Time, len(orders))
	for id, o := range orders {
		ends[id] = o.end
	}
	return ends
}

// change writes the drains as f changes them, and then applies them.
func (drains *Drains) change(f func(map[ID]order)) error {
	drains.writing.Lock()
	defer drains.writing.Unlock()
	// All iterates over the current map without a lock, so change a copy.
	orders := map[ID]order{}
	maps.Copy(orders, drains.orders.Load())
	f(orders)
	if drains.path != "" {
		list := slices.SortedFunc(maps.Values(orders), func(a, b order) int { return a.compare(b.ID) })
		// Write first: a drain that is in effect must survive a restart.
		if err := durable.Write(drains.path, drainDocument{Version: drainsVersion, Drains: list}); err != nil {
			return fmt.Errorf("drains by an operator: %w", err)
		}
	}
	drains.orders.Set(orders)
	latest.Wake(drains.changed)
	return nil
}
