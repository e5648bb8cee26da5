package cluster

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
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
func (store *store) list() []metav1.Object {
	store.mu.Lock()
	defer store.mu.Unlock()
	return slices.Collect(maps.Values(store.objects))
}

func (store *store) len() int {
	store.mu.Lock()
	defer store.mu.Unlock()
	return len(store.objects)
}

// isSynced reports whether the store has received a list.
func (store *store) isSynced() bool {
	store.mu.Lock()
	defer store.mu.Unlock()
	return store.synced
}

// Transformer implements cache.TransformingStore.
func (store *store) Transformer() cache.TransformFunc { return strip }

// Add implements cache.ReflectorStore.
func (store *store) Add(object any) error { return store.Update(object) }

// Update implements cache.ReflectorStore.
func (store *store) Update(object any) error {
	key, o, err := stripped(object)
	if err != nil {
		return err
	}
	if store.update(key, o) {
		store.changed()
	}
	return nil
}

func (store *store) update(key string, object metav1.Object) bool {
	store.mu.Lock()
	defer store.mu.Unlock()
	version := object.GetResourceVersion()
	if old, ok := store.objects[key]; ok && compare(version, old.GetResourceVersion()) <= 0 {
		return false
	}
	if at, ok := store.deleted[key]; ok && compare(version, at) <= 0 {
		return false
	}
	delete(store.deleted, key)
	store.objects[key] = object
	return true
}

// Delete implements cache.ReflectorStore.
func (store *store) Delete(object any) error {
	key, o, err := stripped(object)
	if err != nil {
		return err
	}
	if store.remove(key, o.GetResourceVersion()) {
		store.changed()
	}
	return nil
}

func (store *store) remove(key, version string) bool {
	store.mu.Lock()
	defer store.mu.Unlock()
	old, ok := store.objects[key]
	if ok && compare(version, old.GetResourceVersion()) < 0 {
		return false
	}
	if at, known := store.deleted[key]; !known || compare(version, at) > 0 {
		store.deleted[key] = version
	}
	delete(store.objects, key)
	return ok
}

// Replace implements cache.ReflectorStore. The list replaces the store even if its resource
// versions are older, because etcd may have been restored from a backup.
func (store *store) Replace(list []any, _ string) error {
	objects := make(map[string]metav1.Object, len(list))
	for _, x := range list {
		key, object, err := stripped(x)
		if err != nil {
			return err
		}
		objects[key] = object
	}
	store.mu.Lock()
	// A list without a difference must not cause a translation.
	same := store.synced && len(objects) == len(store.objects)
	for key, object := range objects {
		old, ok := store.objects[key]
		same = same && ok && old.GetUID() == object.GetUID() && old.GetResourceVersion() == object.GetResourceVersion()
	}
	store.objects, store.synced = objects, true
	// The watch continues from the list, so no older event follows.
	clear(store.deleted)
	store.mu.Unlock()
	if !same {
		store.changed()
	}
	return nil
}

// Bookmark implements cache.ReflectorBookmarkStore.
func (store *store) Bookmark(version string) error {
	store.mu.Lock()
	defer store.mu.Unlock()
	maps.DeleteFunc(store.deleted, func(_, at string) bool { return compare(at, version) <= 0 })
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

// networkStatus is the annotation in which Multus lists the addresses of a pod.
const networkStatus = "k8s.v1.cni.cncf.io/network-status"

// lastApplied is the annotation in which kubectl apply stores a copy of the object.
const lastApplied = corev1.LastAppliedConfigAnnotation

// strip removes the fields that no translation reads, in place; for 5 000 pods they take most of
// the memory. It is a cache.TransformFunc.
func strip(object any) (any, error) {
	o, err := meta.Accessor(object)
	if err != nil {
		return object, nil // a tombstone of client-go
	}
	o.SetManagedFields(nil)
	if pod, ok := object.(*corev1.Pod); ok {
		stripPod(pod)
	} else if annotations := o.GetAnnotations(); annotations[lastApplied] != "" {
		annotations = maps.Clone(annotations)
		delete(annotations, lastApplied)
		o.SetAnnotations(annotations)
	}
	return object, nil
}

// stripPod keeps the metadata with the annotation of Multus, and of spec and status only the node,
// the addresses, the readiness with its probes, and the ports.
func stripPod(pod *corev1.Pod) {
	maps.DeleteFunc(pod.Annotations, func(name, _ string) bool { return name != networkStatus })
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i, container := range containers {
			containers[i] = corev1.Container{
				Name: container.Name, Ports: container.Ports, ReadinessProbe: container.ReadinessProbe,
			}
		}
	}
	pod.Spec = corev1.PodSpec{
		Containers: pod.Spec.Containers, InitContainers: pod.Spec.InitContainers,
		NodeName: pod.Spec.NodeName, HostNetwork: pod.Spec.HostNetwork, ReadinessGates: pod.Spec.ReadinessGates,
	}
	pod.Status = corev1.PodStatus{
		Phase: pod.Status.Phase, Reason: pod.Status.Reason, Conditions: pod.Status.Conditions,
		PodIP: pod.Status.PodIP, PodIPs: pod.Status.PodIPs,
	}
}
