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

// Snapshot is the content of a gateway's routing table at one moment.
type Snapshot struct {
	// At is the end of the poll that read it first.
	At     time.Time
	Routes map[netip.Prefix]Route
}

// Has reports whether a prefix is in the table.
func (s Snapshot) Has(p netip.Prefix) bool {
	_, ok := s.Routes[p]
	return ok
}

// Prefixes returns the prefixes in the table, sorted, IPv4 first.
func (s Snapshot) Prefixes() []netip.Prefix {
	return slices.SortedFunc(maps.Keys(s.Routes), netip.Prefix.Compare)
}

// Equal reports whether two routes have the same attributes.
func (r Route) Equal(o Route) bool {
	return r.Prefix == o.Prefix && r.NextHop == o.NextHop && slices.Equal(r.ASPath, o.ASPath) &&
		slices.Equal(r.Communities, o.Communities) && r.LocalPref == o.LocalPref
}

// RouteWatcher polls a gateway's routing table and keeps every change of it. A change that is
// reverted between two polls is missed.
type RouteWatcher struct {
	cancel context.CancelFunc
	done   chan struct{}

	asking  sync.Mutex // of control
	control *Control

	mu      sync.Mutex
	history []Snapshot // never empty
	polls   int
	err     error
	changed chan struct{} // closed at the next change
}

// learned is the command for the routes that the gateway learned over BGP, in every table.
const learned = "show route all where source = RTS_BGP"

// WatchRoutes polls the gateway's routing table every interval until the watcher is closed or BIRD
// no longer answers. BIRD must be running.
func (g *Gateway) WatchRoutes(ctx context.Context, interval time.Duration) (*RouteWatcher, error) {
	control, err := g.Control(ctx)
	if err != nil {
		return nil, err
	}
	w := &RouteWatcher{control: control, done: make(chan struct{}), changed: make(chan struct{})}
	first, err := w.poll()
	if err != nil {
		return nil, errors.Join(err, control.Close())
	}
	w.history = []Snapshot{first}
	var run context.Context
	run, w.cancel = context.WithCancel(context.Background())
	go w.run(run, interval)
	return w, nil
}

func (w *RouteWatcher) poll() (Snapshot, error) {
	w.asking.Lock()
	defer w.asking.Unlock()
	out, err := w.control.Command(learned)
	if err != nil {
		return Snapshot{}, fmt.Errorf("read the routing table of the gateway: %w", err)
	}
	s := Snapshot{At: time.Now(), Routes: map[netip.Prefix]Route{}}
	parseRoutes(out, s.Routes)
	return s, nil
}

func (w *RouteWatcher) run(ctx context.Context, interval time.Duration) {
	defer close(w.done)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s, err := w.poll()
		w.mu.Lock()
		last := w.history[len(w.history)-1]
		if err == nil {
			w.polls++
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

// Last returns the newest snapshot.
func (w *RouteWatcher) Last() Snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.history[len(w.history)-1]
}

// Now polls and returns the table. Last can be older than what another client of BIRD already saw.
func (w *RouteWatcher) Now() (Snapshot, error) { return w.poll() }

// Since returns the last snapshot before t and every later one.
func (w *RouteWatcher) Since(t time.Time) []Snapshot {
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

// Polls returns the number of polls so far.
func (w *RouteWatcher) Polls() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.polls
}

// Wait waits until the table satisfies a condition and returns that snapshot. The error is the
// condition's last one, or reports that BIRD no longer answers.
func (w *RouteWatcher) Wait(ctx context.Context, condition func(Snapshot) error) (Snapshot, error) {
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

// Close stops the watcher.
func (w *RouteWatcher) Close() error {
	w.cancel()
	<-w.done
	return w.control.Close()
}
