package cluster

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/cache"
)

// store holds the objects of one reflector. It ignores duplicate events, and events older than the
// stored object. It implements cache.ReflectorStore, cache.TransformingStore and
// cache.ReflectorBookmarkStore.
type store struct {
	changed func() // called after every change, without mu held

	mu      sync.Mutex
	synced  bool
	objects map[string]metav1.Object
	// deleted maps deleted objects to the resource version of the deletion, until a bookmark excludes
	// older events of the object.
	deleted map[string]string
}

func newStore(changed func()) *store {
	return &store{changed: changed, objects: map[string]metav1.Object{}, deleted: map[string]string{}}
}

// list returns the objects in no particular order.
func (s *store) list() []metav1.Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.objects))
}

func (s *store) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.objects)
}

// isSynced reports whether the store has received a list.
func (s *store) isSynced() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.synced
}

// Transformer implements cache.TransformingStore.
func (s *store) Transformer() cache.TransformFunc { return strip }

// Add implements cache.ReflectorStore.
func (s *store) Add(object any) error { return s.Update(object) }

// Update implements cache.ReflectorStore.
func (s *store) Update(object any) error {
	key, o, err := stripped(object)
	if err != nil {
		return err
	}
	if s.update(key, o) {
		s.changed()
	}
	return nil
}

func (s *store) update(key string, o metav1.Object) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	version := o.GetResourceVersion()
	if old, ok := s.objects[key]; ok && compare(version, old.GetResourceVersion()) <= 0 {
		return false
	}
	if at, ok := s.deleted[key]; ok && compare(version, at) <= 0 {
		return false
	}
	delete(s.deleted, key)
	s.objects[key] = o
	return true
}

// Delete implements cache.ReflectorStore.
func (s *store) Delete(object any) error {
	key, o, err := stripped(object)
	if err != nil {
		return err
	}
	if s.remove(key, o.GetResourceVersion()) {
		s.changed()
	}
	return nil
}

func (s *store) remove(key, version string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, ok := s.objects[key]
	if ok && compare(version, old.GetResourceVersion()) < 0 {
		return false
	}
	if at, known := s.deleted[key]; !known || compare(version, at) > 0 {
		s.deleted[key] = version
	}
	delete(s.objects, key)
	return ok
}

// Replace implements cache.ReflectorStore. The list replaces the store even if its resource
// versions are older, because etcd may have been restored from a backup.
func (s *store) Replace(list []any, _ string) error {
	objects := make(map[string]metav1.Object, len(list))
	for _, x := range list {
		key, o, err := stripped(x)
		if err != nil {
			return err
		}
		objects[key] = o
	}
	s.mu.Lock()
	same := s.synced && len(objects) == len(s.objects)
	for key, o := range objects {
		old, ok := s.objects[key]
		same = same && ok && old.GetUID() == o.GetUID() && old.GetResourceVersion() == o.GetResourceVersion()
	}
	s.objects, s.synced = objects, true
	clear(s.deleted)
	s.mu.Unlock()
	if !same {
		s.changed()
	}
	return nil
}

// Bookmark implements cache.ReflectorBookmarkStore.
func (s *store) Bookmark(version string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, at := range s.deleted {
		if compare(at, version) <= 0 {
			delete(s.deleted, key)
		}
	}
	return nil
}

// Resync implements cache.ReflectorStore.
func (*store) Resync() error { return nil }

// compare compares resource versions. An invalid version counts as newer, so that no event is
// lost; events may be applied twice.
func compare(a, b string) int {
	c, err := resourceversion.CompareResourceVersion(a, b)
	if err != nil {
		return 1
	}
	return c
}

// stripped returns an object without its unused fields, and its key.
func stripped(object any) (key string, o metav1.Object, err error) {
	if object, err = strip(object); err != nil {
		return "", nil, err
	}
	if o, err = meta.Accessor(object); err != nil {
		return "", nil, fmt.Errorf("failed to read the metadata of an object: %w", err)
	}
	return o.GetNamespace() + "/" + o.GetName(), o, nil
}
