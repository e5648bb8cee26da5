package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"

	"github.com/vipgate/vipgate/pkg/kube/meridio2"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

const (
	// dialTimeout and keepAlive detect an API server whose node is down.
	dialTimeout = 5 * time.Second
	keepAlive   = 10 * time.Second
	// listTimeout allows a slow API server to list all pods.
	listTimeout = time.Minute
	// qps and burst are far above the rate of reflectors. client-go's default of 5 a second would
	// delay the start of a Trench with many namespaces.
	qps, burst = 50, 100

	protobuf = "application/vnd.kubernetes.protobuf"
)

// version is the API version of request parameters.
var version = schema.GroupVersion{Version: "v1"}

// clients reach the API server over connections that can be closed together.
type clients struct {
	config      *rest.Config
	connections *connrotation.ConnectionTracker
	codec       runtime.ParameterCodec
	core        rest.Interface
	discovery   rest.Interface
	trenches    rest.Interface
	gateways    rest.Interface
	routers     rest.Interface
}

func newClients(config *rest.Config) (*clients, error) {
	dial := config.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: keepAlive}).DialContext
	}
	// The tracker closes the connections to a hanging API server together.
	dialer := connrotation.NewDialer(dial)
	c := &clients{config: rest.CopyConfig(config), connections: dialer.ConnectionTracker}
	c.config.Dial = dialer.DialContext
	c.config.QPS, c.config.Burst = qps, burst
	c.config.WarningHandlerWithContext = rest.NoWarnings{}
	if file := config.BearerTokenFile; file != "" {
		// client-go caches the token for up to a minute. The resettable source reads the file again when
		// the server refuses the token.
		c.config.BearerToken, c.config.BearerTokenFile = "", ""
		authenticate := transport.ResettableTokenSourceWrapTransport(transport.NewCachedFileTokenSource(file))
		c.config.Wrap(func(next http.RoundTripper) http.RoundTripper {
			return authenticated{authenticate(next), next}
		})
	}

	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, version)
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("failed to create the scheme of the API: %w", err)
		}
	}
	c.codec = runtime.NewParameterCodec(scheme)
	// All API groups share one HTTP client, and with it the tracked connections.
	shared, err := rest.HTTPClientFor(c.config)
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server %s: %w", config.Host, err)
	}
	client := func(group schema.GroupVersion, path string, config *rest.Config) rest.Interface {
		config.GroupVersion, config.APIPath = &group, path
		client, e := rest.RESTClientForConfigAndClient(config, shared)
		err = errors.Join(err, e)
		return client
	}
	// Built-in kinds have protobuf, which is smaller than JSON; custom resources have only JSON.
	typed := rest.CopyConfig(c.config)
	typed.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	typed.ContentType, typed.AcceptContentTypes = protobuf, protobuf+",application/json"
	c.core = client(corev1.SchemeGroupVersion, "/api", rest.CopyConfig(typed))
	c.discovery = client(discoveryv1.SchemeGroupVersion, "/apis", typed)
	c.trenches = client(v1alpha1.Resource.GroupVersion(), "/apis", dynamic.ConfigFor(c.config))
	c.gateways = client(meridio2.GatewayResource().GroupVersion(), "/apis", dynamic.ConfigFor(c.config))
	c.routers = client(meridio2.RouterResource().GroupVersion(), "/apis", dynamic.ConfigFor(c.config))
	if err != nil {
		return nil, fmt.Errorf("failed to create a client of the API server %s: %w", config.Host, err)
	}
	return c, nil
}

// authenticated hides a deprecated method of the token round tripper, which only logs a warning.
type authenticated struct {
	http.RoundTripper
	next http.RoundTripper
}

// WrappedRoundTripper implements net.RoundTripperWrapper of apimachinery.
func (authenticated authenticated) WrappedRoundTripper() http.RoundTripper { return authenticated.next }

// get returns a request without retries: those would hide closed connections for 10 s.
func (clients *clients) get(client rest.Interface, namespace, resource string) *rest.Request {
	return client.Get().Namespace(namespace).Resource(resource).MaxRetries(0)
}

// source lists and watches objects.
type source struct {
	example runtime.Object // an empty object of the listed type
	list    func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch   func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// notOfPods selects the EndpointSlices that were not created from Pods. Pods are followed
// directly: a slice holds 100 endpoints, and the change of one Pod would transfer all of them.
const notOfPods = discoveryv1.LabelManagedBy + "!=endpointslice-controller.k8s.io"

// source returns the list and watch functions of a key.
func (clients *clients) source(key key, trench string) source {
	named := metav1.ListOptions{FieldSelector: "metadata.name=" + key.name}
	switch key.kind {
	case trenches:
		return objectsOf[unstructured.Unstructured, unstructured.UnstructuredList](clients, clients.trenches,
			v1alpha1.Resource.Resource, key.namespace, named)
	case gateways:
		return objectsOf[unstructured.Unstructured, unstructured.UnstructuredList](clients, clients.gateways,
			meridio2.GatewayResource().Resource, key.namespace, named)
	case gatewayRouters:
		return objectsOf[unstructured.Unstructured, unstructured.UnstructuredList](clients, clients.routers,
			meridio2.RouterResource().Resource, key.namespace, metav1.ListOptions{})
	case ownPod:
		return objectsOf[corev1.Pod, corev1.PodList](clients, clients.core, "pods", key.namespace, named)
	case siblings:
		return objectsOf[corev1.Pod, corev1.PodList](clients, clients.core, "pods", key.namespace,
			metav1.ListOptions{LabelSelector: v1alpha1.TrenchPodLabel + "=" + trench})
	case services:
		return objectsOf[corev1.Service, corev1.ServiceList](clients, clients.core, "services", key.namespace,
			metav1.ListOptions{})
	case endpointSlices:
		return objectsOf[discoveryv1.EndpointSlice, discoveryv1.EndpointSliceList](clients, clients.discovery,
			"endpointslices", key.namespace, metav1.ListOptions{LabelSelector: notOfPods})
	case pods:
		return objectsOf[corev1.Pod, corev1.PodList](clients, clients.core, "pods", key.namespace,
			metav1.ListOptions{LabelSelector: v1alpha1.TrenchLabel + "=" + trench})
	default:
		return objectsOf[corev1.Secret, corev1.SecretList](clients, clients.core, "secrets", key.namespace, named)
	}
}

// objectsOf returns the source of the objects in a namespace that match selected.
func objectsOf[T, L any, P interface {
	*T
	runtime.Object
}, Q interface {
	*L
	runtime.Object
}](clients *clients, client rest.Interface, resource, namespace string, selected metav1.ListOptions) source {
	request := func(options metav1.ListOptions) *rest.Request {
		// The reflector sets the remaining options, such as the resource version.
		options.LabelSelector, options.FieldSelector = selected.LabelSelector, selected.FieldSelector
		return clients.get(client, namespace, resource).SpecificallyVersionedParams(&options, clients.codec, version)
	}
	return source{
		P(new(T)),
		func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			list := Q(new(L))
			err := request(options).Do(ctx).Into(list)
			return list, err
		},
		func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			return request(options).Watch(ctx)
		},
	}
}
