package targetset

import (
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
)

// View is one address of one target as status and watchers show it.
type View struct {
	// Health has the state of its checks in Checks, and in State what follows from it and from drains.
	healthcheck.Health
	Checks healthcheck.State
	// Origins are where the target comes from.
	Origins OriginSet
	// Owner is the SPIFFE ID that registered it; "" for other sources.
	Owner string
	// DrainEnd and DrainCause are until when it drains, and why.
	DrainEnd   time.Time
	DrainCause string
}

func (v View) compare(w View) int { return v.Compare(w.Key) }

// same reports whether nothing differs for which watches are notified: another check with the same
// result is no change.
func (v View) same(w View) bool {
	v.LastCheck, w.LastCheck = time.Time{}, time.Time{}
	return v == w
}

// Index is the list of all targets. The load balancer's loop publishes to it and never waits for a
// reader. Its methods may be called from any goroutine.
type Index struct {
	mu       sync.Mutex
	views    map[healthcheck.Key]View
	watchers map[*Watch]struct{}
	// byID are the watches of single targets, of which there may be as many as targets: a change must
	// not visit all of them.
	byID map[ID]map[*Watch]struct{}
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	return &Index{
		views: map[healthcheck.Key]View{}, watchers: map[*Watch]struct{}{}, byID: map[ID]map[*Watch]struct{}{},
	}
}

// Publish applies what changed.
func (r *Index) Publish(changed []View, removed []healthcheck.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range removed {
		delete(r.views, k)
		r.note(k)
	}
	for _, v := range changed {
		if old, known := r.views[v.Key]; !known || !old.same(v) {
			r.views[v.Key] = v
			r.note(v.Key)
		}
	}
}

// note notifies the watches of an address. It is called with mu held.
func (r *Index) note(k healthcheck.Key) {
	for w := range r.watchers {
		w.note(k)
	}
	for w := range r.byID[ID{k.Stream, k.Name}] {
		w.note(k)
	}
}

// List returns every address that wanted accepts, sorted; nil accepts all.
func (r *Index) List(wanted func(healthcheck.Key) bool) []View {
	r.mu.Lock()
	list := make([]View, 0, len(r.views))
	for k, v := range r.views {
		if wanted == nil || wanted(k) {
			list = append(list, v)
		}
	}
	r.mu.Unlock()
	slices.SortFunc(list, View.compare)
	return list
}

// Watch returns a watch of the addresses that wanted accepts; nil accepts all. All of them count as
// changed at first. It must be closed.
func (r *Index) Watch(wanted func(healthcheck.Key) bool) *Watch {
	w := newWatch(r)
	w.wanted = wanted
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watchers[w] = struct{}{}
	for k := range r.views {
		w.note(k)
	}
	return w
}

// WatchTargets returns a watch of the targets that the keys name, with any address. Changes of other
// targets cost it nothing. Of existing targets only the keys count as changed at first. It must be
// closed.
func (r *Index) WatchTargets(keys []healthcheck.Key) *Watch {
	w := newWatch(r)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range keys {
		id := ID{k.Stream, k.Name}
		if r.byID[id] == nil {
			r.byID[id] = map[*Watch]struct{}{}
		}
		r.byID[id][w] = struct{}{}
		w.ids = append(w.ids, id)
		if _, exists := r.views[k]; exists {
			w.note(k)
		}
	}
	return w
}

// Watched reports whether a watch is open.
func (r *Index) Watched() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.watchers)+len(r.byID) > 0
}

// Watch is one reader's view of the changes, merged until it takes them. Its memory is bounded by the
// number of addresses.
type Watch struct {
	index  *Index
	wanted func(healthcheck.Key) bool
	ids    []ID // of WatchTargets
	wake   chan struct{}
	// Guarded by Index.mu.
	dirty map[healthcheck.Key]struct{}
	known map[healthcheck.Key]struct{} // to the reader
}

// newWatch returns a watch whose channel has a token: the first Take may return nothing.
func newWatch(r *Index) *Watch {
	w := &Watch{
		index: r, wake: make(chan struct{}, 1),
		dirty: map[healthcheck.Key]struct{}{}, known: map[healthcheck.Key]struct{}{},
	}
	latest.Wake(w.wake)
	return w
}

// note is called with Index.mu held.
func (w *Watch) note(k healthcheck.Key) {
	if w.wanted == nil || w.wanted(k) {
		w.dirty[k] = struct{}{}
		latest.Wake(w.wake)
	}
}

// Changed holds a token when Take may return something.
func (w *Watch) Changed() <-chan struct{} { return w.wake }

// Take returns what changed since the last Take, sorted.
func (w *Watch) Take() (changed []View, removed []healthcheck.Key) {
	w.index.mu.Lock()
	defer w.index.mu.Unlock()
	for k := range w.dirty {
		if v, exists := w.index.views[k]; exists {
			w.known[k] = struct{}{}
			changed = append(changed, v)
		} else if _, known := w.known[k]; known {
			delete(w.known, k)
			removed = append(removed, k)
		}
	}
	clear(w.dirty)
	slices.SortFunc(changed, View.compare)
	slices.SortFunc(removed, healthcheck.Key.Compare)
	return changed, removed
}

// Close ends the watch.
func (w *Watch) Close() {
	w.index.mu.Lock()
	defer w.index.mu.Unlock()
	delete(w.index.watchers, w)
	for _, id := range w.ids {
		if delete(w.index.byID[id], w); len(w.index.byID[id]) == 0 {
			delete(w.index.byID, id)
		}
	}
}
