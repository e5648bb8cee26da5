package v1alpha1

import (
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Group is the API group, and the prefix of labels and annotations.
const Group = "vipgate.io"

// Resource is the resource of Trenches.
var Resource = schema.GroupVersionResource{Group: Group, Version: "v1alpha1", Resource: "trenches"}

// Kind is the kind of a Trench.
var Kind = schema.GroupVersionKind{Group: Group, Version: "v1alpha1", Kind: "Trench"}

// Labels and annotations.
const (
	// TrenchLabel is on Pods that may be targets; its value is the name of the Trench.
	TrenchLabel = Group + "/trench"
	// TrenchPodLabel is on the pods of the trench itself, which hold lb and frontend.
	TrenchPodLabel = Group + "/trench-pod"

	// DrainLabel is on Nodes whose trench pods drain; its value is "true".
	DrainLabel = Group + "/drain"
	// ConfirmAnnotation of a Trench has the identifiers of held removals that may take effect.
	ConfirmAnnotation = Group + "/confirm"

	// Annotations of a Service: its VIPs, separated by commas; the check of its targets as JSON;
	// how many targets must be ready; how long a target that leaves keeps its flows; the fate of its
	// VIPs while too few targets are ready; Maglev as JSON.
	VIPsAnnotation       = Group + "/vips"
	CheckAnnotation      = Group + "/check"
	MinReadyAnnotation   = Group + "/min-ready"
	DrainTimeAnnotation  = Group + "/drain-time"
	LastResortAnnotation = Group + "/last-resort"
	// PolicyAnnotation has path attributes by state, a policy of the attractor without vips.
	PolicyAnnotation = Group + "/policy"
	MaglevAnnotation = Group + "/maglev"
)

// Types of conditions of a Trench; with the prefix of the group, of a Service.
const (
	Accepted   = "Accepted"
	Advertised = "Advertised"
	// Published, of a Trench with spec.publish, is false while a part of that has no effect.
	Published = "Published"
	// Held, of a Trench, is true while a removal waits for a confirmation.
	Held = "Held"
	// TargetsAccepted is false while pods that a Service selects cannot be targets.
	TargetsAccepted = "TargetsAccepted"
)

// LoadBalancerClass returns the spec.loadBalancerClass of the Services of a Trench.
func LoadBalancerClass(trench string) string { return Group + "/" + trench }

// Trench describes the VIPs of a trench, its gateways, and where its Services and targets are.
type Trench struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   Spec   `json:"spec"`
	Status Status `json:"status,omitempty"`
}

// Spec is the trench file without its name, with what Kubernetes needs besides.
type Spec struct {
	// Network that targets are reached by. Nil: that of the pods themselves.
	Network *Network `json:"network,omitempty"`
	// Namespaces of the Services and targets; empty: that of the Trench.
	Namespaces []string `json:"namespaces,omitempty"`
	// Attractor as in the trench file; a gateway has passwordSecret instead of passwordFile.
	Attractor map[string]any `json:"attractor"`
	// Streams as in the trench file, for targets that are no pods.
	Streams []any `json:"streams,omitempty"`
	// Defaults of the streams of Services: drainTime, minReady, check and maglev, as in the trench
	// file.
	Defaults map[string]any `json:"defaults,omitempty"`
	// MaxRemoval as in the trench file; 0: its default.
	MaxRemoval int `json:"maxRemoval,omitempty"`
	// NodeDrain drains the VIPs of a trench pod while its node has [DrainLabel].
	NodeDrain bool `json:"nodeDrain,omitempty"`
	// Quota bounds the Services of each namespace other than the Trench's. Nil: the defaults.
	Quota *Quota `json:"quota,omitempty"`
	// Communities that policies of Services in namespaces other than the Trench's may have.
	Communities []string `json:"communities,omitempty"`
	// Publish says which addresses the status of Services shows. Nil: the VIPs.
	Publish *Publish `json:"publish,omitempty"`
}

// Network is a secondary network of the targets.
type Network struct {
	// Name is NAMESPACE/NAME of the NetworkAttachmentDefinition.
	Name string `json:"name"`
	// Subnets that addresses of targets must lie in; empty: anywhere, and in no other namespace.
	Subnets []string `json:"subnets,omitempty"`
}

// Quota is the share of a namespace in the trench file. 0: the default.
type Quota struct {
	Streams     int `json:"streams,omitempty"`
	Targets     int `json:"targets,omitempty"`
	Expressions int `json:"expressions,omitempty"`
}

// DefaultQuota holds the defaults, above ordinary use. lb has memory for 700 tables of streams, and
// connection tracking has 262 144 entries, 120 for each target whose checks fail.
var DefaultQuota = Quota{Streams: 200, Targets: 500, Expressions: 200}

// MaxStreams and MaxTargets bound all these namespaces, unless the quota of one is larger.
const MaxStreams, MaxTargets = 400, 1000

// Publish replaces the VIPs in the status of Services. One of Addresses and FromService is set.
type Publish struct {
	// Addresses are IP addresses or host names; see [PublishedAddress].
	Addresses []string `json:"addresses,omitempty"`
	// FromService is the Service, NAMESPACE/NAME or NAME, whose status is copied.
	FromService string `json:"fromService,omitempty"`
	// IngressClass is the class of the Ingresses whose status gets the addresses, too, GatewayClass
	// that of Gateways of the Gateway API.
	IngressClass string `json:"ingressClass,omitempty"`
	GatewayClass string `json:"gatewayClass,omitempty"`
}

// PublishedAddress reports whether the API server accepts an address in the status of a Service:
// an IP address without a zone that is not an IPv4-mapped IPv6 address, or a DNS name that does
// not look like an IPv4 address. The schema of the CustomResourceDefinition has the same rule.
func PublishedAddress(address string) bool {
	if a, err := netip.ParseAddr(address); err == nil {
		return a.Zone() == "" && !a.Is4In6()
	}
	last := address[strings.LastIndexByte(address, '.')+1:]
	return len(validation.IsDNS1123Subdomain(address)) == 0 && strings.Trim(last, "0123456789") != ""
}

// Status of a Trench.
type Status struct {
	ObservedGeneration int64              `json:"observedGeneration,omitempty"`
	Conditions         []metav1.Condition `json:"conditions,omitempty"`
	// Holders lists the Services that have VIPs. Nil: no leader wrote it yet.
	Holders []Holder `json:"holders,omitempty"`
}

// MaxHeld is the maximum number of VIPs in Holders, each with the longest names: etcd has 1.5 MiB.
const MaxHeld = 5000

// Holder is a Service with the VIPs that no other Service gets.
type Holder struct {
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	VIPs      []string  `json:"vips"`
}

// Namespaces returns the namespaces of the Services and targets.
func (trench *Trench) Namespaces() []string {
	if len(trench.Spec.Namespaces) == 0 {
		return []string{trench.Namespace}
	}
	return trench.Spec.Namespaces
}

// FromUnstructured decodes a Trench.
func FromUnstructured(u *unstructured.Unstructured) (*Trench, error) {
	t := &Trench{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, t); err != nil {
		return nil, fmt.Errorf("decode Trench %s/%s: %w", u.GetNamespace(), u.GetName(), err)
	}
	return t, nil
}
