package publication

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// sources follows the objects that spec.publish needs in addition to the objects of the
// translation. Only one goroutine uses it.
type sources struct {
	client  dynamic.Interface
	log     *slog.Logger
	changed chan struct{} // has a token after a change

	followers map[source]*cluster.Mirror
	logged    string // the last logged problems
}

// source is a set of objects of the API server.
type source struct {
	resource        schema.GroupVersionResource
	namespace, name string // an empty name selects all
}

// needed returns the sources of a Trench in a stable order.
func needed(t *v1alpha1.Trench) (all []source) {
	publish := t.Spec.Publish
	if publish == nil {
		return nil
	}
	if publish.FromService != "" {
		all = append(all, fromService(t))
	}
	if publish.IngressClass != "" || publish.GatewayClass != "" {
		all = append(all, source{resource: v1alpha1.Resource, namespace: t.Namespace}) // for held
	}
	for _, namespace := range t.Namespaces() {
		if publish.IngressClass != "" {
			all = append(all, source{resource: ingresses, namespace: namespace})
		}
		if publish.GatewayClass != "" {
			all = append(all, source{resource: gateways, namespace: namespace})
		}
	}
	return all
}

// follow starts the followers of sources and ends all remaining ones.
func (sources *sources) follow(ctx context.Context, keys []source) {
	for key, follower := range sources.followers {
		if !slices.Contains(keys, key) {
			follower.End()
			delete(sources.followers, key)
		}
	}
	for _, key := range keys {
		if sources.followers[key] == nil {
			sources.followers[key] = sources.start(ctx, key)
		}
	}
}

func fromService(t *v1alpha1.Trench) source {
	namespace, name, ok := strings.Cut(t.Spec.Publish.FromService, "/")
	if !ok {
		namespace, name = t.Namespace, namespace
	}
	return source{services, namespace, name}
}

func (sources *sources) start(ctx context.Context, key source) *cluster.Mirror {
	mirror := cluster.NewMirror(sources.changed)
	var selected metav1.ListOptions
	if key.name != "" {
		selected.FieldSelector = "metadata.name=" + key.name
	}
	mirror.Start(ctx, fmt.Sprintf("%s in namespace %s", key.resource.Resource, key.namespace),
		sources.client.Resource(key.resource).Namespace(key.namespace), selected,
		func(_ bool, err error) { attempted(mirror, err) }) // published logs failures
	return mirror
}

// attempted records the answer to a list or a watch. An API server that is away changes nothing.
func attempted(mirror *cluster.Mirror, err error) {
	// After an expired resource version the reflector lists again.
	if err == nil || answered(err) && !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		mirror.Attempted(err)
	}
}

// list returns the objects of a source, sorted by name.
func (sources *sources) list(key source) (all []*unstructured.Unstructured) {
	follower := sources.followers[key]
	if follower == nil {
		return nil
	}
	for _, o := range follower.List() {
		if object, ok := o.(*unstructured.Unstructured); ok {
			all = append(all, object)
		}
	}
	slices.SortFunc(all, func(a, b *unstructured.Unstructured) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return all
}

func convert[T any](object *unstructured.Unstructured) (*T, error) {
	x := new(T)
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, x)
	return x, err
}
