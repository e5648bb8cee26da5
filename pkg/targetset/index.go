package targetset

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/latest"
)

// View is one address of one target as people see it.
type View struct {
	// Health has the state of its checks in Checks, and in State what follows from
	// it and from drains.
	healthcheck.Health
	Checks healthcheck.State
	// Origins are where the target comes from.
	Origins OriginSet
	// Owner is who registered it, a SPIFFE ID; "" for other sources.
	Owner string
	// DrainEnd and DrainCause say until when it drains, and why.
	DrainEnd   time.Time
	DrainCause string
}

// Index is the list of all targets for those who look. The load balancer's loop
// publishes to it and never waits for a reader. It is ready for use once created by
// [NewIndex]; its methods may be called from any goroutine.
type Index struct {
	mu       sync.Mutex
	views    map[healthcheck.Key]View
	watchers map[*Watch]struct{}
	// byID are the watches of single targets, of which there may be as many as
	// targets: a change must not have to ask all of them.
	byID map[ID]map[*Watch]struct{}
}

// NewIndex returns an empty index.
func NewIndex() *Index {
	return &Index{views: map[healthcheck.Key]View{}, watchers: map[*Watch]struct{}{}, byID: map[ID]map[*Watch]struct{}{}}
}

// same reports whether nothing differs that a change is reported for: checks that go on
// as before are none.
func (v View) same(w View) bool {
	v.LastCheck, w.LastCheck = time.Time{}, time.Time{}
	return v == w
}

// Publish takes over what changed; the rest wakes no watch.
func (r *Index) Publish(changed []View, removed []healthcheck.Key) {
	if len(changed) == 0 && len(removed) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range removed {
		delete(r.views, k)
	}
	for _, v := range changed {
		if old, known := r.views[v.Key]; known && old.same(v) {
			continue
		}
		r.views[v.Key] = v
		r.note(v.Key)
	}
	for _, k := range removed {
		r.note(k)
	}
}

// note notifies the watches of an address. It is called with mu held.
func (r *Index) note(k healthcheck.Key) {
	for w := range r.watchers {
		w.note(k)
	}
	for w := range r.byID[ID{Stream: k.Stream, Name: k.Name}] {
		w.note(k)
	}
}

// Get returns one address.
func (r *Index) Get(k healthcheck.Key) (View, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, ok := r.views[k]
	return v, ok
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
	slices.SortFunc(list, func(a, b View) int { return a.Compare(b.Key) })
	return list
}

// Watch returns a watch of the addresses that wanted accepts; nil accepts all.
// Everything that is there counts as changed. It must be closed.
func (r *Index) Watch(wanted func(healthcheck.Key) bool) *Watch {
	w := newWatch(r)
	w.wanted = wanted
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watchers[w] = struct{}{}
	for k := range r.views {
		w.note(k)
	}
	latest.Wake(w.wake) // also when there is nothing: the first Take says so
	return w
}

// WatchTargets returns a watch of the targets that the keys name, with whatever
// address. It costs a change of another target nothing. Of existing targets
// only the keys count as changed. It must be closed.
func (r *Index) WatchTargets(keys []healthcheck.Key) *Watch {
	w := newWatch(r)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range keys {
		id := ID{Stream: k.Stream, Name: k.Name}
		if r.byID[id] == nil {
			r.byID[id] = map[*Watch]struct{}{}
		}
		r.byID[id][w] = struct{}{}
		w.ids = append(w.ids, id)
		if _, there := r.views[k]; there {
			w.note(k)
		}
	}
	latest.Wake(w.wake)
	return w
}

// Watchers returns the number of open watches.
func (r *Index) Watchers() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.watchers)
	for _, watches := range r.byID {
		n += len(watches)
	}
	return n
}

func newWatch(r *Index) *Watch {
	return &Watch{
		index: r, wake: make(chan struct{}, 1), dirty: map[healthcheck.Key]struct{}{},
		told: map[healthcheck.Key]struct{}{},
	}
}

// Watch is one reader's view of the changes, merged until it takes them. Its
// memory is bounded by the number of addresses.
type Watch struct {
	index  *Index
	wanted func(healthcheck.Key) bool
	ids    []ID // of WatchTargets
	wake   chan struct{}
	// Guarded by Index.mu.
	dirty map[healthcheck.Key]struct{}
	told  map[healthcheck.Key]struct{} // what the reader knows
}

// note is called with Index.mu held.
func (w *Watch) note(k healthcheck.Key) {
	if w.wanted == nil || w.wanted(k) {
		w.dirty[k] = struct{}{}
		latest.Wake(w.wake)
	}
}

// Changed holds a token when Take may have something.
func (w *Watch) Changed() <-chan struct{} { return w.wake }

// Take returns what changed since the last Take, sorted.
func (w *Watch) Take() (changed []View, removed []healthcheck.Key) {
	w.index.mu.Lock()
	defer w.index.mu.Unlock()
	for k := range w.dirty {
		v, ok := w.index.views[k]
		_, told := w.told[k]
		switch {
		case ok:
			w.told[k] = struct{}{}
			changed = append(changed, v)
		case told:
			delete(w.told, k)
			removed = append(removed, k)
		}
	}
	clear(w.dirty)
	slices.SortFunc(changed, func(a, b View) int { return a.Compare(b.Key) })
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
	maps.DeleteFunc(w.dirty, func(healthcheck.Key, struct{}) bool { return true })
}
