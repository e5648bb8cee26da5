package cluster

import (
	"context"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/vipgate/vipgate/pkg/latest"
)

// Mirror caches selected objects of a resource for a task that reads its changes. See [NewMirror].
type Mirror struct {
	cache.Store
	changed chan<- struct{}
	synced  atomic.Bool
	cancel  context.CancelFunc
	ended   sync.WaitGroup

	mu  sync.Mutex
	err error // the first of consecutive errors of lists and watches for one reason; nil after success
}

// NewMirror returns an empty Mirror. changed has a token after each change.
func NewMirror(changed chan<- struct{}) *Mirror {
	return &Mirror{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: changed}
}

// Start keeps the cache current until End is called or ctx ends. attempted is called with the error
// of each list that fails, and with the result of each watch, which RBAC may refuse alone. If it is
// nil, State has the result.
func (mirror *Mirror) Start(ctx context.Context, name string, client dynamic.ResourceInterface,
	selected metav1.ListOptions, attempted func(watches bool, err error),
) {
	ctx, mirror.cancel = context.WithCancel(ctx)
	if attempted == nil {
		attempted = func(_ bool, err error) { mirror.Attempted(err) }
	}
	only := func(options metav1.ListOptions) metav1.ListOptions {
		options.LabelSelector, options.FieldSelector = selected.LabelSelector, selected.FieldSelector
		return options
	}
	lister := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := client.List(ctx, only(options))
			if err != nil {
				attempted(false, err)
				return nil, err
			}
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			w, err := client.Watch(ctx, only(options))
			attempted(true, err)
			return w, err
		},
	}
	mirror.ended.Go(func() { runReflector(ctx, name, lister, &unstructured.Unstructured{}, mirror) })
}

// End stops following, if the mirror is not nil.
func (mirror *Mirror) End() {
	if mirror != nil {
		mirror.cancel()
		mirror.ended.Wait()
	}
}

// Attempted records the result of a list or a watch for State.
func (mirror *Mirror) Attempted(err error) {
	mirror.mu.Lock()
	defer mirror.mu.Unlock()
	if err == nil || mirror.err == nil || apierrors.ReasonForError(err) != apierrors.ReasonForError(mirror.err) {
		mirror.err = err
		latest.Wake(mirror.changed)
	}
}

// State reports whether the objects were ever listed, and returns why they cannot be read now.
func (mirror *Mirror) State() (synced bool, err error) {
	mirror.mu.Lock()
	defer mirror.mu.Unlock()
	return mirror.synced.Load(), mirror.err
}

// Add implements cache.ReflectorStore.
func (mirror *Mirror) Add(object any) error { return mirror.wake(mirror.Store.Add(object)) }

// Update implements cache.ReflectorStore.
func (mirror *Mirror) Update(object any) error { return mirror.wake(mirror.Store.Update(object)) }

// Delete implements cache.ReflectorStore. A watch reports an object no longer selected as deleted.
func (mirror *Mirror) Delete(object any) error { return mirror.wake(mirror.Store.Delete(object)) }

// Replace implements cache.ReflectorStore.
func (mirror *Mirror) Replace(list []any, version string) error {
	err := mirror.Store.Replace(list, version)
	mirror.synced.Store(true)
	return mirror.wake(err)
}

func (mirror *Mirror) wake(err error) error {
	latest.Wake(mirror.changed)
	return err
}

// runReflector keeps a store in sync with a list until ctx ends. The lister reports failures.
func runReflector(ctx context.Context, name string, lister cache.ListerWatcher, example any,
	store cache.ReflectorStore,
) {
	silent := klog.Logger{}
	cache.NewReflectorWithOptions(lister, example, store, cache.ReflectorOptions{
		Name: name, Logger: &silent,
		Backoff: &wait.Backoff{Duration: minDelay, Cap: maxDelay, Factor: 2, Jitter: 0.2, Steps: 10},
	}).RunWithContext(klog.NewContext(ctx, silent))
}
