package targetset

import (
	"cmp"
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

// DrainOrder is a drain by an operator.
type DrainOrder struct {
	// At is when it was ordered, in wall time: it outlives the process.
	At time.Time
	// For is how long flows go on.
	For time.Duration
}

// Left returns how much of the drain is left: a clock that was set while the
// process was away makes it no longer than For and no shorter than 0.
func (o DrainOrder) Left(now time.Time) time.Duration {
	return min(max(0, o.For-now.Sub(o.At)), o.For)
}

// Drains are the drains by operators. They last until they are taken back, also across
// restarts when they have a file. Its methods may be called from any goroutine;
// Drain and Undrain wait for the disk, the others for nothing.
type Drains struct {
	path    string
	log     *slog.Logger
	changed chan struct{}

	writing sync.Mutex // held from the change to the end of its write
	mu      sync.Mutex
	orders  map[ID]DrainOrder
}

// drainsVersion is the version of the format of the file.
const drainsVersion = 1

// drainDocument is the content of the file.
type drainDocument struct {
	Version int          `json:"version"`
	Drains  []savedDrain `json:"drains"`
}

type savedDrain struct {
	Stream string    `json:"stream"`
	Name   string    `json:"name"`
	At     time.Time `json:"at"`
	For    string    `json:"for"`
}

// OpenDrains reads the drains from the file; "" is none: they are kept in memory. A
// file that makes no sense is moved aside, which the log says loudly, and there are
// none. One that cannot be read is an error: to go on would undrain what an
// operator drained.
func OpenDrains(path string, log *slog.Logger) (*Drains, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	d := &Drains{path: path, log: log, changed: make(chan struct{}, 1), orders: map[ID]DrainOrder{}}
	if path == "" {
		return d, nil
	}
	var document drainDocument
	_, found, err := durable.Read(path, &document)
	if err == nil && found {
		if d.orders, err = document.parse(); err != nil {
			err = fmt.Errorf("%s %w: %w", path, durable.ErrCorrupt, err)
		}
	}
	switch {
	case errors.Is(err, durable.ErrCorrupt):
		durable.SetAside(path, err, time.Now(), log)
		d.orders = map[ID]DrainOrder{}
	case err != nil:
		return nil, fmt.Errorf("drains by an operator: %w", err)
	}
	if len(d.orders) > 0 {
		latest.Wake(d.changed)
	}
	return d, nil
}

// Changed wakes the caller of [Drains.All]. Wake-ups conflate.
func (d *Drains) Changed() <-chan struct{} { return d.changed }

// Drain orders a drain, or orders it again, and returns once that will survive a
// restart. After an error nothing has changed in this process.
func (d *Drains) Drain(stream, name string, drainFor time.Duration, now time.Time) error {
	if err := errors.Join(CheckName(stream), CheckName(name)); err != nil {
		return fmt.Errorf("drain %s: %w", ID{Stream: stream, Name: name}, err)
	}
	if drainFor < 0 {
		return fmt.Errorf("drain %s/%s: %v is negative", stream, name, drainFor)
	}
	return d.change(func(orders map[ID]DrainOrder) {
		orders[ID{Stream: stream, Name: name}] = DrainOrder{At: now, For: drainFor}
	})
}

// Undrain takes a drain back and reports whether there was one. It returns once that
// will survive a restart; after an error nothing has changed.
func (d *Drains) Undrain(stream, name string) (bool, error) {
	id := ID{Stream: stream, Name: name}
	d.mu.Lock()
	_, drained := d.orders[id]
	d.mu.Unlock()
	if !drained {
		return false, nil
	}
	return true, d.change(func(orders map[ID]DrainOrder) { delete(orders, id) })
}

// All returns all drains.
func (d *Drains) All() map[ID]DrainOrder {
	d.mu.Lock()
	defer d.mu.Unlock()
	return maps.Clone(d.orders)
}

// change writes what f makes of the drains, and then has it count.
func (d *Drains) change(f func(map[ID]DrainOrder)) error {
	d.writing.Lock()
	defer d.writing.Unlock()
	orders := d.All()
	f(orders)
	if d.path != "" {
		if err := durable.Write(d.path, document(orders)); err != nil {
			return fmt.Errorf("drains by an operator: %w", err)
		}
	}
	d.mu.Lock()
	d.orders = orders
	d.mu.Unlock()
	latest.Wake(d.changed)
	return nil
}

func document(orders map[ID]DrainOrder) drainDocument {
	document := drainDocument{Version: drainsVersion, Drains: make([]savedDrain, 0, len(orders))}
	for _, id := range slices.SortedFunc(maps.Keys(orders), compareID) {
		o := orders[id]
		document.Drains = append(document.Drains, savedDrain{
			Stream: id.Stream, Name: id.Name, At: o.At.Round(0),
			For: o.For.String(),
		})
	}
	return document
}

func (d drainDocument) parse() (map[ID]DrainOrder, error) {
	if d.Version != drainsVersion {
		return nil, fmt.Errorf("version %d is not %d", d.Version, drainsVersion)
	}
	orders := make(map[ID]DrainOrder, len(d.Drains))
	for i, s := range d.Drains {
		for _, name := range []string{s.Stream, s.Name} {
			if err := CheckName(name); err != nil {
				return nil, fmt.Errorf("drain %d: %w", i, err)
			}
		}
		length, err := time.ParseDuration(s.For)
		if err != nil || length < 0 {
			return nil, fmt.Errorf("drain %d: %q is no duration", i, s.For)
		}
		orders[ID{Stream: s.Stream, Name: s.Name}] = DrainOrder{At: s.At, For: length}
	}
	return orders, nil
}

func compareID(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Stream, b.Stream), cmp.Compare(a.Name, b.Name))
}
