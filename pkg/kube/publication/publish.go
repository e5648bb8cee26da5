package publication

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// gateways is the resource of the Gateway API. Only two fields are used, so its Go types are not
// imported.
var gateways = schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}

// maxGatewayAddresses is the limit of the Gateway API for the addresses in a status.
const maxGatewayAddresses = 16

// published holds the addresses of spec.publish and the objects that get them.
type published struct {
	replaces  bool                         // addresses replace the VIPs
	addresses []corev1.LoadBalancerIngress // empty while their source has no address
	ingresses []*networkingv1.Ingress
	gateways  []*unstructured.Unstructured
	// pending reports whether a source was neither listed nor refused by the API server yet.
	pending  bool
	problems []publishProblem
}

// publishProblem is the reason why a part of spec.publish has no effect, or is outdated.
type publishProblem struct{ reason, message string }

// Reasons of the condition Published.
const (
	reasonPublished        = "Published"
	reasonSourceMissing    = "SourceMissing"
	reasonSourceEmpty      = "SourceEmpty"
	reasonSourceUnreadable = "SourceUnreadable"
	reasonClassHeld        = "ClassHeld"
	reasonStatusRefused    = "StatusRefused"
)

// ingressOf returns the status entry of an IP address or a host name.
func ingressOf(address string) corev1.LoadBalancerIngress {
	if _, err := netip.ParseAddr(address); err != nil {
		return corev1.LoadBalancerIngress{Hostname: address}
	}
	return proxied(corev1.LoadBalancerIngress{IP: address})
}

// proxied returns an address with the mode Proxy, and without the ports of the Service that it
// was copied from. Clients in the cluster must also reach the VIP through the gateways: with the
// API server's default mode VIP, kube-proxy would redirect their packets to the endpoints of the
// Service.
func proxied(i corev1.LoadBalancerIngress) corev1.LoadBalancerIngress {
	i.IPMode, i.Ports = nil, nil
	if i.IP != "" {
		mode := corev1.LoadBalancerIPModeProxy
		i.IPMode = &mode
	}
	return i
}

// published returns the addresses that a Trench publishes, and the objects that get them, from the
// sources listed so far.
func (s *sources) published(t *v1alpha1.Trench) published {
	var p published
	spec := t.Spec.Publish
	if spec == nil {
		return p
	}
	for _, key := range needed(t) {
		switch synced, err := s.followers[key].state(); {
		case err != nil:
			p.problems = append(p.problems, unreadable(key, err))
		case !synced:
			p.pending = true
		}
	}
	p.replaces = spec.FromService != "" || len(spec.Addresses) > 0
	if spec.FromService != "" {
		s.copyService(&p, fromService(t))
	}
	for _, a := range spec.Addresses {
		if v1alpha1.PublishedAddress(a) { // the translation reports invalid addresses
			p.addresses = append(p.addresses, ingressOf(a))
		}
	}
	if class := spec.IngressClass; class != "" && !s.held(&p, t, "ingressClass", class) {
		for _, namespace := range namespaces(t) {
			for _, u := range s.list(source{resource: ingresses, namespace: namespace}) {
				if i, err := convert[networkingv1.Ingress](u); err == nil && classOf(i) == class {
					p.ingresses = append(p.ingresses, i)
				}
			}
		}
	}
	if class := spec.GatewayClass; class != "" && !s.held(&p, t, "gatewayClass", class) {
		for _, namespace := range namespaces(t) {
			for _, u := range s.list(source{resource: gateways, namespace: namespace}) {
				if name, _, _ := unstructured.NestedString(u.Object, "spec", "gatewayClassName"); name == class {
					p.gateways = append(p.gateways, u)
				}
			}
		}
	}
	s.logProblems(p)
	return p
}

// copyService adds the addresses of spec.publish.fromService.
func (s *sources) copyService(p *published, key source) {
	list := s.list(key)
	for _, u := range list {
		if service, err := convert[corev1.Service](u); err == nil {
			for _, i := range service.Status.LoadBalancer.Ingress {
				p.addresses = append(p.addresses, proxied(i))
			}
		}
	}
	name := key.namespace + "/" + key.name
	synced, err := s.followers[key].state()
	switch {
	case !synced || err != nil || len(p.addresses) > 0:
	case len(list) == 0:
		p.problems = append(p.problems, publishProblem{
			reasonSourceMissing, "Service " + name + " of spec.publish.fromService does not exist: " +
				"create it, or correct the name",
		})
	default:
		p.problems = append(p.problems, publishProblem{
			reasonSourceEmpty, "Service " + name + " of spec.publish.fromService has no address in its status yet: " +
				"see the controller of its load balancer",
		})
	}
}

// held reports whether an older Trench publishes for the same class in a common namespace,
// because two Trenches would overwrite each other's addresses. It returns true until the Trenches
// are listed.
func (s *sources) held(p *published, t *v1alpha1.Trench, field, class string) bool {
	trenches := source{resource: v1alpha1.Resource, namespace: t.Namespace}
	if synced, _ := s.followers[trenches].state(); !synced {
		return true
	}
	for _, u := range s.list(trenches) {
		other, err := v1alpha1.FromUnstructured(u)
		if err != nil || other.Name == t.Name || other.Spec.Publish == nil {
			continue
		}
		theirs := other.Spec.Publish.IngressClass
		if field == "gatewayClass" {
			theirs = other.Spec.Publish.GatewayClass
		}
		common := slices.ContainsFunc(namespaces(t), func(n string) bool { return slices.Contains(namespaces(other), n) })
		older := cmp.Or(other.CreationTimestamp.Compare(t.CreationTimestamp.Time), cmp.Compare(other.Name, t.Name)) < 0
		if theirs == class && common && older {
			p.problems = append(p.problems, publishProblem{reasonClassHeld, fmt.Sprintf(
				"the older Trench %s has %s %s in spec.publish: choose another class, or remove it there",
				other.Name, field, class)})
			return true
		}
	}
	return false
}

// unreadable returns the problem of a source that the API server refuses.
func unreadable(key source, err error) publishProblem {
	what := fmt.Sprintf("%s in namespace %s cannot be read", key.resource.Resource, key.namespace)
	switch {
	case apierrors.IsForbidden(err):
		what += ": bind a Role there that allows get, list and watch (docs/kubernetes.md, Permissions)"
	case apierrors.IsNotFound(err):
		what += ": the API server does not have " + key.resource.GroupResource().String() + " " + key.resource.Version +
			": install its CustomResourceDefinition"
	default:
		what += ": " + err.Error()
	}
	return publishProblem{reasonSourceUnreadable, what}
}

// logProblems logs the problems when they change.
func (s *sources) logProblems(p published) {
	if p.pending {
		return
	}
	text := p.text()
	switch {
	case text == s.logged:
	case text == "":
		s.log.Info("publication of addresses complete")
	default:
		s.log.Warn("publication of addresses incomplete", "reason", p.problems[0].reason, "error", text)
	}
	s.logged = text
}

func (p published) text() string {
	var lines []string
	for _, x := range p.problems {
		lines = append(lines, x.message)
	}
	return listed(lines)
}

// classOf returns the class of an Ingress. The annotation takes precedence over the field, as in
// most controllers: the field may have been added later for a different controller.
func classOf(i *networkingv1.Ingress) string {
	if class := i.Annotations["kubernetes.io/ingress.class"]; class != "" {
		return class
	}
	if class := i.Spec.IngressClassName; class != nil {
		return *class
	}
	return ""
}

// of returns the addresses to publish for VIPs, or the live ones if there are none: addresses are
// never cleared.
func (p published) of(vips []vip.VIP, live []corev1.LoadBalancerIngress) []corev1.LoadBalancerIngress {
	addresses := p.addresses
	if !p.replaces {
		addresses = nil
		for _, v := range vips {
			if v.Prefix().IsSingleIP() {
				addresses = append(addresses, ingressOf(v.Prefix().Addr().String()))
			}
		}
	}
	if len(addresses) == 0 {
		return live
	}
	return addresses
}

// refused adds a problem for the status writes that the API server refuses.
func (p published) refused(failing map[types.UID]error) published {
	var refusals []error
	look := func(uid types.UID) {
		if err := failing[uid]; answered(err) {
			refusals = append(refusals, err)
		}
	}
	for _, i := range p.ingresses {
		look(i.UID)
	}
	for _, u := range p.gateways {
		look(u.GetUID())
	}
	if len(refusals) > 0 {
		message := fmt.Sprintf("the API server refuses the status of %d objects: %v", len(refusals), refusals[0])
		p.problems = append(slices.Clone(p.problems), publishProblem{reasonStatusRefused, message})
	}
	return p
}

// condition returns the condition Published of a Trench with the verdict v, or nil without
// spec.publish. It keeps the live condition until every source is listed, so that a new leader
// does not repeat the Events of the previous one.
func (p published) condition(t *v1alpha1.Trench, v translation.Verdict) *metav1.Condition {
	if t.Spec.Publish == nil {
		return nil
	}
	c := &metav1.Condition{Type: v1alpha1.Published, Status: metav1.ConditionFalse, ObservedGeneration: v.Generation}
	if !v.Accepted {
		c.Reason, c.Message = notAccepted, "the Trench is not accepted: the addresses that are published stay"
		return c
	}
	if p.pending {
		return find(t.Status.Conditions, v1alpha1.Published)
	}
	for _, x := range v.Problems {
		if x.Reason == translation.ReasonAddressNotPublished {
			p.problems = append(slices.Clone(p.problems), publishProblem{x.Reason, x.Message})
		}
	}
	if len(p.problems) > 0 {
		c.Reason, c.Message = p.problems[0].reason, p.text()
		return c
	}
	var texts []string
	for _, a := range p.addresses {
		texts = append(texts, strings.Trim(a.IP+" "+a.Hostname, " "))
	}
	c.Status, c.Reason = metav1.ConditionTrue, reasonPublished
	c.Message = listedBy(texts, ", ") + " for Services"
	if class := t.Spec.Publish.IngressClass; class != "" {
		c.Message += fmt.Sprintf(", Ingresses of class %s (%d)", class, len(p.ingresses))
	}
	if class := t.Spec.Publish.GatewayClass; class != "" {
		c.Message += fmt.Sprintf(", Gateways of class %s (%d)", class, len(p.gateways))
	}
	return c
}

// publishEvents returns the Event for a change of the condition Published.
func publishEvents(wanted, live *metav1.Condition) []event {
	switch {
	case wanted == nil || wanted.Reason == notAccepted:
		return nil
	case live != nil && live.Status == wanted.Status && live.Reason == wanted.Reason:
		return nil
	}
	return []event{{wanted.Status != metav1.ConditionTrue, wanted.Reason, "Publish", wanted.Message}}
}

func ingressStatus(i *networkingv1.Ingress, p published) wanted {
	w := wanted{resource: ingresses, object: reference(networkingv1.SchemeGroupVersion.WithKind("Ingress"), i)}
	var addresses []networkingv1.IngressLoadBalancerIngress
	for _, a := range p.addresses {
		addresses = append(addresses, networkingv1.IngressLoadBalancerIngress{IP: a.IP, Hostname: a.Hostname})
	}
	if len(addresses) == 0 {
		return w
	}
	w.addresses = text(addresses)
	w.addressesDiffer = !equality.Semantic.DeepEqual(addresses, i.Status.LoadBalancer.Ingress)
	w.status = loadBalancer(addresses)
	return w
}

// gatewayAddress is an element of status.addresses of a Gateway.
type gatewayAddress struct {
	Type  string `json:"type"`
	Value string `json:"value"`
}

func gatewayStatus(u *unstructured.Unstructured, p published) wanted {
	w := wanted{resource: gateways, object: reference(gateways.GroupVersion().WithKind("Gateway"), u)}
	var addresses []gatewayAddress
	for _, a := range p.addresses {
		if a.IP != "" {
			addresses = append(addresses, gatewayAddress{"IPAddress", a.IP})
		}
		if a.Hostname != "" {
			addresses = append(addresses, gatewayAddress{"Hostname", a.Hostname})
		}
	}
	if len(addresses) == 0 {
		return w
	}
	addresses = addresses[:min(len(addresses), maxGatewayAddresses)]
	var live struct {
		Status struct {
			Addresses []gatewayAddress `json:"addresses"`
		} `json:"status"`
	}
	b, err := json.Marshal(u.Object)
	if err == nil {
		err = json.Unmarshal(b, &live)
	}
	w.addresses = text(addresses)
	w.addressesDiffer = err != nil || !slices.Equal(addresses, live.Status.Addresses)
	w.status = map[string]any{"addresses": addresses}
	return w
}

// leftStatus returns the status of a Service that no longer belongs to a Trench. The empty status
// removes the conditions that the leader applied, and keeps the fields of other managers.
// leftStatus reports whether the Service has such conditions.
func leftStatus(s *corev1.Service) (wanted, bool) {
	const prefix = v1alpha1.Group + "/"
	class := s.Spec.LoadBalancerClass
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer && class != nil && strings.HasPrefix(*class, prefix) {
		return wanted{}, false // the leader of its Trench writes them
	}
	has := slices.ContainsFunc(s.Status.Conditions, func(c metav1.Condition) bool {
		return strings.HasPrefix(c.Type, prefix)
	})
	return wanted{
		resource: services, object: reference(corev1.SchemeGroupVersion.WithKind("Service"), s),
		status: map[string]any{}, conditions: "none", conditionsDiffer: true,
	}, has
}
