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
	// In Health, State combines the state of the checks, which is in Checks, with drains.
	healthcheck.Health
	Checks healthcheck.State
	// Origins is the set of sources that offer the target.
	Origins OriginSet
	// Owner is the SPIFFE ID that registered it; "" for other sources.
	Owner string
	// DrainEnd and DrainCause are the end and the reason of its drain.
	DrainEnd   time.Time
	DrainCause string
}

func (view View) compare(w View) int { return view.Compare(w.Key) }

// same reports whether two views are equal for watches: a check with the same result is no change.
func (v View) same(w View) bool {
	v.LastCheck, w.LastCheck = time.Time{}, time.Time{}
	return v == w
}

// Index is the list of all targets. The load balancer's loop publishes to it and never waits for a
// reader. Its methods may be called from any goroutine.
type Index struct {
	mu    sync.Mutex
	views map[healthcheck.Key]View
	// watches is indexed by target: there may be as many watches as targets, and a change must not
	// visit all of them. Watches of all targets have the zero ID.
	watches map[ID]map[*Watch]struct{}
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	return &Index{views: map[healthcheck.Key]View{}, watches: map[ID]map[*Watch]struct{}{}}
}

// Publish applies changes and notifies the watches.
func (r *Index) Publish(changed []View, removed []healthcheck.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range removed {
		delete(r.views, key)
		r.note(key)
	}
	for _, view := range changed {
		if old, known := r.views[view.Key]; !known || !old.same(view) {
			r.views[view.Key] = view
			r.note(view.Key)
		}
	}
}

// note notifies the watches of an address. It is called with mu held.
func (r *Index) note(key healthcheck.Key) {
	for _, id := range []ID{{}, {key.Stream, key.Name}} {
		for w := range r.watches[id] {
			w.note(key)
		}
	}
}

// List returns every address that wanted accepts, sorted; nil accepts all.
func (r *Index) List(wanted func(healthcheck.Key) bool) []View {
	r.mu.Lock()
	list := make([]View, 0, len(r.views))
	for k, view := range r.views {
		if wanted == nil || wanted(k) {
			list = append(list, view)
		}
	}
	// Sort without the mutex, for which the loop of the load balancer would wait.
	r.mu.Unlock()
	slices.SortFunc(list, View.compare)
	return list
}

// Watch returns a watch of the addresses that wanted accepts; nil accepts all. All of them count as
// changed at first. It must be closed.
func (r *Index) Watch(wanted func(healthcheck.Key) bool) *Watch {
	r.mu.Lock()
	defer r.mu.Unlock()
	watch := r.watch([]ID{{}}, wanted)
	for k := range r.views {
		watch.note(k)
	}
	return watch
}

// WatchTargets returns a watch of the targets that the keys name, with any address. Changes of
// other targets cost nothing. Only keys of targets count as changed at first. It must be closed.
func (r *Index) WatchTargets(keys []healthcheck.Key) *Watch {
	ids := make([]ID, len(keys))
	for i, k := range keys {
		ids[i] = ID{k.Stream, k.Name}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	watch := r.watch(ids, nil)
	for _, key := range keys {
		if _, exists := r.views[key]; exists {
			watch.note(key)
		}
	}
	return watch
}

// watch adds a watch whose channel has a token: the first Take may return nothing.
func (r *Index) watch(ids []ID, wanted func(healthcheck.Key) bool) *Watch {
	watch := &Watch{
		index: r, ids: ids, wanted: wanted, wake: make(chan struct{}, 1),
		dirty: map[healthcheck.Key]struct{}{}, known: map[healthcheck.Key]struct{}{},
	}
	for _, id := range ids {
		if r.watches[id] == nil {
			r.watches[id] = map[*Watch]struct{}{}
		}
		r.watches[id][watch] = struct{}{}
	}
	latest.Wake(watch.wake)
	return watch
}

// Watch is one reader's view of the changes, merged until it takes them. Its memory is bounded by
// the number of addresses.
type Watch struct {
	index  *Index
	ids    []ID
	wanted func(healthcheck.Key) bool
	wake   chan struct{}
	// Guarded by Index.mu.
	dirty map[healthcheck.Key]struct{}
	known map[healthcheck.Key]struct{} // to the reader
}

// note is called with Index.mu held.
func (watch *Watch) note(key healthcheck.Key) {
	if watch.wanted == nil || watch.wanted(key) {
		watch.dirty[key] = struct{}{}
		latest.Wake(watch.wake)
	}
}

// Changed holds a token when Take may return something.
func (watch *Watch) Changed() <-chan struct{} { return watch.wake }

// Take returns the changes since the last Take, sorted.
func (watch *Watch) Take() (changed []View, removed []healthcheck.Key) {
	watch.index.mu.Lock()
	defer watch.index.mu.Unlock()
	for key := range watch.dirty {
		if view, exists := watch.index.views[key]; exists {
			watch.known[key] = struct{}{}
			changed = append(changed, view)
			// A target that came and went between two calls is not reported as removed.
		} else if _, known := watch.known[key]; known {
			delete(watch.known, key)
			removed = append(removed, key)
		}
	}
	clear(watch.dirty)
	slices.SortFunc(changed, View.compare)
	slices.SortFunc(removed, healthcheck.Key.Compare)
	return changed, removed
}

// Close ends the watch.
func (watch *Watch) Close() {
	watch.index.mu.Lock()
	defer watch.index.mu.Unlock()
	for _, id := range watch.ids {
		// Without this the index grows with each target that was ever watched.
		if delete(watch.index.watches[id], watch); len(watch.index.watches[id]) == 0 {
			delete(watch.index.watches, id)
		}
	}
}
