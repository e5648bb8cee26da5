package publication

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Delays between attempts to list and watch.
const (
	minWatchDelay = 200 * time.Millisecond
	maxWatchDelay = 5 * time.Second
)

// sources follows the objects that spec.publish needs in addition to the objects of the
// translation. Only one goroutine uses it.
type sources struct {
	client  dynamic.Interface
	log     *slog.Logger
	changed chan struct{} // has a token after a change

	followers map[source]*follower
	logged    string // the last logged problems
}

// source is a set of objects of the API server.
type source struct {
	resource        schema.GroupVersionResource
	namespace, name string // an empty name selects all
}

// follower caches the objects of one source.
type follower struct {
	cache.Store
	changed chan<- struct{}
	stop    context.CancelFunc
	ended   sync.WaitGroup

	mu     sync.Mutex
	synced bool  // the source was listed at least once
	err    error // last answer to a list or watch
}

// needed returns the sources of a Trench in a stable order.
func needed(t *v1alpha1.Trench) (all []source) {
	p := t.Spec.Publish
	if p == nil {
		return nil
	}
	if p.FromService != "" {
		all = append(all, fromService(t))
	}
	if p.IngressClass != "" || p.GatewayClass != "" {
		all = append(all, source{resource: v1alpha1.Resource, namespace: t.Namespace}) // for held
	}
	for _, namespace := range namespaces(t) {
		if p.IngressClass != "" {
			all = append(all, source{resource: ingresses, namespace: namespace})
		}
		if p.GatewayClass != "" {
			all = append(all, source{resource: gateways, namespace: namespace})
		}
	}
	return all
}

// follow starts the followers of a Trench's sources and ends all remaining ones. They run until
// ctx ends or stop is called.
func (s *sources) follow(ctx context.Context, t *v1alpha1.Trench) {
	want := map[source]bool{}
	for _, key := range needed(t) {
		want[key] = true
	}
	for key, f := range s.followers {
		if !want[key] {
			f.end()
			delete(s.followers, key)
		}
	}
	for key := range want {
		if s.followers[key] == nil {
			s.followers[key] = s.start(ctx, key)
		}
	}
}

// stop ends all followers.
func (s *sources) stop() {
	for _, f := range s.followers {
		f.end()
	}
	clear(s.followers)
}

func fromService(t *v1alpha1.Trench) source {
	namespace, name, ok := strings.Cut(t.Spec.Publish.FromService, "/")
	if !ok {
		namespace, name = t.Namespace, namespace
	}
	return source{services, namespace, name}
}

func namespaces(t *v1alpha1.Trench) []string {
	if len(t.Spec.Namespaces) == 0 {
		return []string{t.Namespace}
	}
	return t.Spec.Namespaces
}

func (s *sources) start(ctx context.Context, key source) *follower {
	ctx, cancel := context.WithCancel(ctx)
	f := &follower{Store: newStore(), changed: s.changed, stop: cancel}
	client := s.client.Resource(key.resource).Namespace(key.namespace)
	only := func(o metav1.ListOptions) metav1.ListOptions {
		if key.name != "" {
			o.FieldSelector = "metadata.name=" + key.name
		}
		return o
	}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := client.List(ctx, only(o))
			if err != nil {
				f.attempted(err) // a successful list does not prove that RBAC allows the watch
				return nil, err
			}
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := client.Watch(ctx, only(o))
			f.attempted(err)
			return w, err
		},
	}
	silent := klog.Logger{} // published logs failures
	ctx = klog.NewContext(ctx, silent)
	reflector := cache.NewReflectorWithOptions(lw, &unstructured.Unstructured{}, f, cache.ReflectorOptions{
		Name: fmt.Sprintf("%s in namespace %s", key.resource.Resource, key.namespace), Logger: &silent,
		Backoff: &wait.Backoff{Duration: minWatchDelay, Cap: maxWatchDelay, Factor: 2, Jitter: 0.2, Steps: 10},
	})
	f.ended.Go(func() { reflector.RunWithContext(ctx) })
	return f
}

func newStore() cache.Store { return cache.NewStore(cache.MetaNamespaceKeyFunc) }

func (f *follower) end() {
	f.stop()
	f.ended.Wait()
}

// attempted records the result of a list or a watch. It keeps the last answer while the API
// server is unreachable.
func (f *follower) attempted(err error) {
	if err != nil && !answered(err) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return
	}
	f.mu.Lock()
	differs := fmt.Sprint(f.err) != fmt.Sprint(err)
	f.err = err
	f.mu.Unlock()
	if differs {
		latest.Wake(f.changed)
	}
}

// state reports whether the source was listed at least once, and returns why it cannot be read
// now.
func (f *follower) state() (synced bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.synced, f.err
}

// list returns the objects of a source, sorted by name.
func (s *sources) list(key source) (all []*unstructured.Unstructured) {
	f := s.followers[key]
	if f == nil {
		return nil
	}
	for _, o := range f.List() {
		if u, ok := o.(*unstructured.Unstructured); ok {
			all = append(all, u)
		}
	}
	slices.SortFunc(all, func(a, b *unstructured.Unstructured) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return all
}

func convert[T any](u *unstructured.Unstructured) (*T, error) {
	x := new(T)
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, x)
	return x, err
}

// The methods of cache.ReflectorStore that modify the store wake the leader.

// Add implements cache.ReflectorStore.
func (f *follower) Add(o any) error { return f.wake(f.Store.Add(o)) }

// Update implements cache.ReflectorStore.
func (f *follower) Update(o any) error { return f.wake(f.Store.Update(o)) }

// Delete implements cache.ReflectorStore.
func (f *follower) Delete(o any) error { return f.wake(f.Store.Delete(o)) }

// Replace implements cache.ReflectorStore.
func (f *follower) Replace(o []any, version string) error {
	err := f.Store.Replace(o, version)
	f.mu.Lock()
	f.synced = true
	f.mu.Unlock()
	return f.wake(err)
}

func (f *follower) wake(err error) error {
	latest.Wake(f.changed)
	return err
}
