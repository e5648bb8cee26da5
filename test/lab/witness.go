package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Sight is what a gateway's table held at one moment.
type Sight struct {
	// At is when the look that saw it first was over.
	At     time.Time
	Routes map[netip.Prefix]Route
}

// Has tells whether a prefix is in the table.
func (s Sight) Has(p netip.Prefix) bool {
	_, ok := s.Routes[p]
	return ok
}

// Prefixes are the prefixes in the table, sorted, IPv4 first.
func (s Sight) Prefixes() []netip.Prefix {
	return slices.SortedFunc(maps.Keys(s.Routes), netip.Prefix.Compare)
}

// Equal tells whether two routes say the same.
func (r Route) Equal(o Route) bool {
	return r.Prefix == o.Prefix && r.NextHop == o.NextHop && slices.Equal(r.ASPath, o.ASPath) &&
		slices.Equal(r.Communities, o.Communities) && r.LocalPref == o.LocalPref
}

// Witness looks at a gateway's table all the time and remembers every state
// that it saw. What came and went between two looks stays unseen.
type Witness struct {
	control *Control
	cancel  context.CancelFunc
	done    chan struct{}

	mu      sync.Mutex
	history []Sight // never empty
	looks   int
	err     error
	changed chan struct{} // closed at the next change
}

// learned asks for what the gateway learned over BGP, in every table.
const learned = "show route all where source = RTS_BGP"

// Witness looks at the gateway's table every interval until it is closed, or
// until BIRD no longer answers. BIRD must be running.
func (g *Gateway) Witness(ctx context.Context, interval time.Duration) (*Witness, error) {
	control, err := g.Control(ctx)
	if err != nil {
		return nil, err
	}
	w := &Witness{control: control, done: make(chan struct{}), changed: make(chan struct{})}
	first, err := w.look()
	if err != nil {
		return nil, errors.Join(err, control.Close())
	}
	w.history = []Sight{first}
	var run context.Context
	run, w.cancel = context.WithCancel(context.Background())
	go w.run(run, interval)
	return w, nil
}

func (w *Witness) look() (Sight, error) {
	out, err := w.control.Command(learned)
	if err != nil {
		return Sight{}, fmt.Errorf("look at the gateway's table: %w", err)
	}
	s := Sight{At: time.Now(), Routes: map[netip.Prefix]Route{}}
	parseRoutes(out, s.Routes)
	return s, nil
}

func (w *Witness) run(ctx context.Context, interval time.Duration) {
	defer close(w.done)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s, err := w.look()
		w.mu.Lock()
		last := w.history[len(w.history)-1]
		if err == nil {
			w.looks++
		}
		if err != nil || !maps.EqualFunc(s.Routes, last.Routes, Route.Equal) {
			if w.err = err; err == nil {
				w.history = append(w.history, s)
			}
			close(w.changed)
			w.changed = make(chan struct{})
		}
		w.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Last is what was seen last.
func (w *Witness) Last() Sight {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.history[len(w.history)-1]
}

// Since is what was seen last before t, and everything different after it.
func (w *Witness) Since(t time.Time) []Sight {
	w.mu.Lock()
	defer w.mu.Unlock()
	first := 0
	for i, s := range w.history {
		if !s.At.After(t) {
			first = i
		}
	}
	return slices.Clone(w.history[first:])
}

// Looks counts the looks so far.
func (w *Witness) Looks() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.looks
}

// Wait waits until the table satisfies a condition and returns the sight that
// does. The error is the last one of the condition, or says that BIRD no longer
// answers.
func (w *Witness) Wait(ctx context.Context, condition func(Sight) error) (Sight, error) {
	for {
		w.mu.Lock()
		s, changed, broken := w.history[len(w.history)-1], w.changed, w.err
		w.mu.Unlock()
		err := condition(s)
		if err == nil || broken != nil {
			return s, broken
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return s, fmt.Errorf("%w (waited: %w)", err, context.Cause(ctx))
		}
	}
}

// Close ends the looking.
func (w *Witness) Close() error {
	w.cancel()
	<-w.done
	return w.control.Close()
}
