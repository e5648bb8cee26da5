package meridio2

import (
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/vipgate/vipgate/pkg/kube/translation"
)

// Group is the API group of Meridio 2, and the prefix of its readiness gates.
const Group = "meridio-2.nordix.org"

var (
	gatewayVersion = schema.GroupVersion{Group: "gateway.networking.k8s.io", Version: "v1"}
	routerVersion  = schema.GroupVersion{Group: Group, Version: "v1alpha1"}

	gatewayKind = gatewayVersion.WithKind("Gateway")
	routerKind  = routerVersion.WithKind("GatewayRouter")
)

// GatewayResource returns the resource of Gateways.
func GatewayResource() schema.GroupVersionResource { return gatewayVersion.WithResource("gateways") }

// RouterResource returns the resource of GatewayRouters.
func RouterResource() schema.GroupVersionResource {
	return routerVersion.WithResource("gatewayrouters")
}

// Objects is the input of a translation, which does not modify it.
type Objects struct {
	Gateway *unstructured.Unstructured // nil if it does not exist
	// Routers lists the GatewayRouters of the Gateway's namespace, for any Gateway.
	Routers []*unstructured.Unstructured
}

// Read adds the objects of YAML documents or of JSON, including the lists that kubectl prints. It
// ignores all remaining kinds. The error names the object that cannot be read, or a second Gateway.
func (objects *Objects) Read(reader io.Reader) error {
	return translation.ReadEach(reader, objects.add)
}

func (objects *Objects) add(object unstructured.Unstructured) error {
	switch object.GroupVersionKind() {
	case gatewayKind:
		if objects.Gateway != nil {
			return fmt.Errorf("%s/%s is a second Gateway, besides %s/%s: pass only one",
				object.GetNamespace(), object.GetName(), objects.Gateway.GetNamespace(), objects.Gateway.GetName())
		}
		objects.Gateway = &object
	case routerKind:
		objects.Routers = append(objects.Routers, &object)
	}
	return nil
}

type gateway struct {
	Status struct {
		Addresses []struct {
			Type  *string `json:"type"`
			Value string  `json:"value"`
		} `json:"addresses"`
	} `json:"status"`
}

type router struct {
	Spec struct {
		Interface string       `json:"interface"`
		Address   string       `json:"address"`
		Protocol  string       `json:"protocol"`
		BGP       *bgpSession  `json:"bgp"`
		Static    *staticRoute `json:"static"`
	} `json:"spec"`
}

// The values of spec.protocol.
const (
	protocolBGP    = "BGP"
	protocolStatic = "Static"
)

// staticRoute replaces bgpSession for a router that has static routes to the VIPs.
type staticRoute struct {
	BFD *bfd `json:"bfd"`
}

// bgpSession is the BGP session of a GatewayRouter. The API server sets the defaults of Meridio
// 2, so a field is nil or empty only in objects that were not read from an API server.
type bgpSession struct {
	RemoteASN  int64  `json:"remoteASN"`
	LocalASN   int64  `json:"localASN"`
	RemotePort *int64 `json:"remotePort"`
	LocalPort  *int64 `json:"localPort"`
	HoldTime   string `json:"holdTime"`
	BFD        *bfd   `json:"bfd"`
}

type bfd struct {
	MinTx      string `json:"minTx"`
	MinRx      string `json:"minRx"`
	Multiplier int64  `json:"multiplier"`
}

// Defaults of Meridio 2.
const (
	defaultPort     = 179
	defaultHoldTime = "240s"
)

// refersTo reports whether a GatewayRouter refers to the Gateway, which must be in the same
// namespace. As in Meridio 2, only the name and the namespace are compared.
func refersTo(router, gateway *unstructured.Unstructured) bool {
	name, _, _ := unstructured.NestedString(router.Object, "spec", "gatewayRef", "name")
	namespace, named, _ := unstructured.NestedString(router.Object, "spec", "gatewayRef", "namespace")
	if !named {
		namespace = router.GetNamespace()
	}
	return router.GetNamespace() == gateway.GetNamespace() && namespace == gateway.GetNamespace() &&
		name == gateway.GetName()
}
