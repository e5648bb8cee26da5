package cluster

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

type kind int

const (
	trenches kind = iota
	siblings
	services // the Trench names the objects from here to secrets
	endpointSlices
	pods
	secrets
	gateways
	gatewayRouters
	ownPod
)

// key identifies the objects of a follower: all of a kind in a namespace, or the named one.
type key struct {
	kind            kind
	namespace, name string
}

func (kind kind) String() string {
	return [...]string{
		"Trench", "trench pods", "Services", "EndpointSlices", "Pods", "Secrets", "Gateway", "GatewayRouters", "Pod",
	}[kind]
}

func (key key) String() string {
	switch key.kind {
	case trenches, gateways, ownPod:
		return fmt.Sprintf("%s %s/%s", key.kind, key.namespace, key.name)
	case secrets:
		return fmt.Sprintf("Secret %s/%s", key.namespace, key.name)
	}
	return fmt.Sprintf("%s in namespace %s", key.kind, key.namespace)
}

func compareKeys(key, b key) int {
	return cmp.Or(cmp.Compare(key.kind, b.kind), cmp.Compare(key.namespace, b.namespace), cmp.Compare(key.name, b.name))
}

// own returns the key of the Trench, or of the Gateway that replaces it.
func (cluster *Cluster) own() key {
	if cluster.Gateway != "" {
		return key{gateways, cluster.Namespace, cluster.Gateway}
	}
	return key{trenches, cluster.Namespace, cluster.Trench}
}

// siblings returns the key of the trench's pods; with a Gateway, of this process's pod.
func (cluster *Cluster) siblings() key {
	if cluster.Gateway != "" {
		return key{ownPod, cluster.Namespace, cluster.Pod}
	}
	return key{kind: siblings, namespace: cluster.Namespace}
}

// needed returns the sorted keys that a Trench names, and reports whether the Trench is readable.
func (cluster *Cluster) needed(trench *unstructured.Unstructured) (keys []key, readable bool) {
	if cluster.Gateway != "" {
		return []key{{kind: gatewayRouters, namespace: cluster.Namespace}}, true
	}
	namespaces, gateways := []string{cluster.Namespace}, []any(nil)
	if trench != nil {
		t, err := v1alpha1.FromUnstructured(trench)
		if err != nil {
			return nil, false
		}
		namespaces = t.Namespaces()
		gateways, _ = t.Spec.Attractor["gateways"].([]any)
	}
	for _, n := range namespaces {
		if n != "" { // "" would select all namespaces
			keys = append(keys, key{services, n, ""}, key{endpointSlices, n, ""}, key{pods, n, ""})
		}
	}
	// Check every type: an old CustomResourceDefinition may not have validated the object.
	for _, g := range gateways {
		gateway, _ := g.(map[string]any)
		reference, _ := gateway["passwordSecret"].(map[string]any)
		if name, _ := reference["name"].(string); name != "" {
			keys = append(keys, key{secrets, cluster.Namespace, name})
		}
	}
	slices.SortFunc(keys, compareKeys)
	return slices.Compact(keys), true
}
