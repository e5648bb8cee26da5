package publication

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
)

// Delays between attempts to list and watch.
const (
	minWatchDelay = 200 * time.Millisecond
	maxWatchDelay = 5 * time.Second
)

// ingressOf returns an address or a host name as it is published. Clients in the cluster go through
// the gateways, too: with the mode VIP, kube-proxy would take their packets to its own endpoints.
func ingressOf(address string) corev1.LoadBalancerIngress {
	if _, err := netip.ParseAddr(address); err != nil {
		return corev1.LoadBalancerIngress{Hostname: address}
	}
	mode := corev1.LoadBalancerIPModeProxy
	return corev1.LoadBalancerIngress{IP: address, IPMode: &mode}
}

// sources follow the objects that only spec.publish names, while it names them. One goroutine uses
// them.
type sources struct {
	client  dynamic.Interface
	changed chan struct{} // has a token after a change

	followers map[source]*follower
}

// source is a set of objects of the API server.
type source struct {
	resource        schema.GroupVersionResource
	namespace, name string // name "": all
}

// follower keeps the objects of one source.
type follower struct {
	cache.Store
	changed chan<- struct{}
	stop    context.CancelFunc
	ended   sync.WaitGroup
}

// follow follows what a Trench publishes, and nothing else, until ctx ends or stop is called.
func (s *sources) follow(ctx context.Context, t *v1alpha1.Trench) {
	want := map[source]bool{}
	if p := t.Spec.Publish; p != nil {
		if p.FromService != "" {
			want[fromService(t)] = true
		}
		if p.IngressClass != "" {
			for _, namespace := range namespaces(t) {
				want[source{resource: ingresses, namespace: namespace}] = true
			}
		}
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
	f := &follower{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), changed: s.changed, stop: cancel}
	client := s.client.Resource(key.resource).Namespace(key.namespace)
	only := func(o metav1.ListOptions) metav1.ListOptions {
		if key.name != "" {
			o.FieldSelector = "metadata.name=" + key.name
		}
		return o
	}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return client.List(ctx, only(o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return client.Watch(ctx, only(o))
		},
	}
	reflector := cache.NewReflectorWithOptions(lw, &unstructured.Unstructured{}, f, cache.ReflectorOptions{
		Name:    fmt.Sprintf("%s in namespace %s", key.resource.Resource, key.namespace),
		Backoff: &wait.Backoff{Duration: minWatchDelay, Cap: maxWatchDelay, Factor: 2, Jitter: 0.2, Steps: 10},
	})
	f.ended.Go(func() { reflector.RunWithContext(ctx) })
	return f
}

func (f *follower) end() {
	f.stop()
	f.ended.Wait()
}

// published returns the addresses that a Trench publishes and the Ingresses that get them, as far
// as they are known.
func (s *sources) published(t *v1alpha1.Trench) published {
	var p published
	spec := t.Spec.Publish
	if spec == nil {
		return p
	}
	switch {
	case spec.FromService != "":
		p.replaces = true
		for _, u := range s.list(fromService(t)) {
			if service, err := convert[corev1.Service](u); err == nil {
				p.addresses = service.Status.LoadBalancer.Ingress
			}
		}
	case len(spec.Addresses) > 0:
		p.replaces = true
		for _, a := range spec.Addresses {
			if v1alpha1.PublishedAddress(a) { // the translation reports the others
				p.addresses = append(p.addresses, ingressOf(a))
			}
		}
	}
	if spec.IngressClass == "" {
		return p
	}
	for _, namespace := range namespaces(t) {
		for _, u := range s.list(source{resource: ingresses, namespace: namespace}) {
			i, err := convert[networkingv1.Ingress](u)
			if err == nil && classOf(i) == spec.IngressClass {
				p.ingresses = append(p.ingresses, i)
			}
		}
	}
	return p
}

// classOf returns the class of an Ingress, also one from before the field was there.
func classOf(i *networkingv1.Ingress) string {
	if class := i.Spec.IngressClassName; class != nil {
		return *class
	}
	return i.Annotations["kubernetes.io/ingress.class"]
}

// list returns the objects of a source in the order of their names.
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

// The methods of cache.ReflectorStore that change something.

// Add implements cache.ReflectorStore.
func (f *follower) Add(o any) error { return f.wake(f.Store.Add(o)) }

// Update implements cache.ReflectorStore.
func (f *follower) Update(o any) error { return f.wake(f.Store.Update(o)) }

// Delete implements cache.ReflectorStore.
func (f *follower) Delete(o any) error { return f.wake(f.Store.Delete(o)) }

// Replace implements cache.ReflectorStore.
func (f *follower) Replace(o []any, version string) error { return f.wake(f.Store.Replace(o, version)) }

func (f *follower) wake(err error) error {
	latest.Wake(f.changed)
	return err
}
