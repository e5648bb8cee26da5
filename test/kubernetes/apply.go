package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"

	"github.com/vipgate/vipgate/test/harness"
)

// applyTimeout bounds Apply; a CustomResourceDefinition takes a second to be served.
const applyTimeout = time.Minute

// fieldManager is the owner of the fields that Apply writes.
const fieldManager = "test"

// Apply applies YAML documents in their order, like `kubectl apply --server-side
// --force-conflicts`, and then the status of each object that has one, like its controller or
// kubelet. Objects without a namespace are created in default. It waits until the API server
// serves the kind of a CustomResourceDefinition.
func (c *Cluster) Apply(t testing.TB, manifests string) {
	t.Helper()
	c.ApplyIn(t, metav1.NamespaceDefault, manifests)
}

// ApplyIn is Apply with another default namespace.
func (c *Cluster) ApplyIn(t testing.TB, namespace, manifests string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), applyTimeout)
	defer cancel()
	harness.Must(t, apply(ctx, c.admin, namespace, manifests))
}

func apply(ctx context.Context, config *rest.Config, namespace, manifests string) error {
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	objects, err := dynamic.NewForConfigAndClient(config, client)
	if err != nil {
		return err
	}
	kinds, err := discovery.NewDiscoveryClientForConfigAndClient(config, client)
	if err != nil {
		return err
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(kinds))
	documents := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifests), 4096)
	for {
		object := &unstructured.Unstructured{}
		err := documents.Decode(&object.Object)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("failed to decode a manifest: %w", err)
		case len(object.Object) == 0:
			continue
		}
		if object.GetNamespace() == "" {
			object.SetNamespace(namespace)
		}
		for {
			err := applyObject(ctx, objects, mapper, object)
			if err == nil {
				break
			}
			err = fmt.Errorf("failed to apply %s %s/%s: %w", object.GetKind(), object.GetNamespace(),
				object.GetName(), err)
			if !notServed(err) {
				return err
			}
			select {
			case <-ctx.Done():
				return err
			case <-time.After(pollInterval):
				mapper.Reset()
			}
		}
	}
}

// notServed reports whether the API server does not serve the kind of the object, or does not
// serve it yet.
func notServed(err error) bool {
	return meta.IsNoMatchError(err) ||
		apierrors.IsNotFound(err) && strings.Contains(err.Error(), "could not find the requested resource")
}

// applyObject applies an object and its status.
func applyObject(ctx context.Context, objects dynamic.Interface, mapper meta.RESTMapper,
	object *unstructured.Unstructured,
) error {
	kind := object.GroupVersionKind()
	mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return err
	}
	var resource dynamic.ResourceInterface = objects.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		resource = objects.Resource(mapping.Resource).Namespace(object.GetNamespace())
	} else {
		object.SetNamespace("")
	}
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	force := true
	options := metav1.PatchOptions{FieldManager: fieldManager, Force: &force}
	if _, err := resource.Patch(ctx, object.GetName(), types.ApplyPatchType, body, options); err != nil {
		return err
	}
	if _, has := object.Object["status"]; has && kind.GroupKind() != customResource {
		_, err = resource.Patch(ctx, object.GetName(), types.ApplyPatchType, body, options, "status")
	}
	return err
}

// customResource is the kind whose generated manifests contain a status that must be ignored.
var customResource = schema.GroupKind{Group: "apiextensions.k8s.io", Kind: "CustomResourceDefinition"}
