package nodedrain

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// nodes caches the Nodes with the drain label. Other Nodes are never read.
type nodes struct {
	cache.Store
	changed chan struct{} // has a token after a change
	stop    context.CancelFunc
	ended   sync.WaitGroup

	mu     sync.Mutex
	listed bool
	err    error // of the last list or watch; nil after success
}

// follow keeps the Nodes current until stop is called or ctx ends.
func follow(ctx context.Context, client dynamic.Interface, changed chan struct{}) *nodes {
	nodes := &nodes{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: changed}
	ctx, nodes.stop = context.WithCancel(ctx)
	resource := client.Resource(corev1.SchemeGroupVersion.WithResource("nodes"))
	labelled := func(options metav1.ListOptions) metav1.ListOptions {
		options.LabelSelector = v1alpha1.DrainLabel + "=true"
		return options
	}
	lister := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list, err := resource.List(ctx, labelled(options))
			if err != nil {
				nodes.failed(err)
				return nil, err
			}
			return list, nil
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			w, err := resource.Watch(ctx, labelled(options))
			nodes.failed(err)
			return w, err
		},
	}
	silent := klog.Logger{} // the drainer reports failures
	reflector := cache.NewReflectorWithOptions(lister, &unstructured.Unstructured{}, nodes, cache.ReflectorOptions{
		Name: "nodes to drain", Logger: &silent,
		Backoff: &wait.Backoff{Duration: 200 * time.Millisecond, Cap: 5 * time.Second, Factor: 2, Jitter: 0.2, Steps: 10},
	})
	nodes.ended.Go(func() { reflector.RunWithContext(klog.NewContext(ctx, silent)) })
	return nodes
}

// end stops following, if nodes is not nil.
func (nodes *nodes) end() {
	if nodes == nil {
		return
	}
	nodes.stop()
	nodes.ended.Wait()
}

// failed records the result of a list or a watch: of consecutive errors, the first.
func (nodes *nodes) failed(err error) {
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	if err == nil || nodes.err == nil {
		nodes.err = err
		latest.Wake(nodes.changed)
	}
}

// state reports whether the Nodes were listed at least once, and returns why they cannot be read
// now.
func (nodes *nodes) state() (listed bool, err error) {
	nodes.mu.Lock()
	defer nodes.mu.Unlock()
	return nodes.listed, nodes.err
}

// leaves reports whether a node has the drain label.
func (nodes *nodes) leaves(name string) bool {
	_, labelled, _ := nodes.GetByKey(name)
	return labelled
}

// The methods of cache.ReflectorStore that modify the store wake the drainer.

// Add implements cache.ReflectorStore.
func (nodes *nodes) Add(node any) error { return nodes.wake(nodes.Store.Add(node)) }

// Delete implements cache.ReflectorStore. A watch reports a node without the label as deleted.
func (nodes *nodes) Delete(node any) error { return nodes.wake(nodes.Store.Delete(node)) }

// Replace implements cache.ReflectorStore.
func (nodes *nodes) Replace(list []any, version string) error {
	err := nodes.Store.Replace(list, version)
	nodes.mu.Lock()
	nodes.listed = true
	nodes.mu.Unlock()
	return nodes.wake(err)
}

func (nodes *nodes) wake(err error) error {
	latest.Wake(nodes.changed)
	return err
}
