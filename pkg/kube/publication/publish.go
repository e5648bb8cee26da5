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

// gateways is the Gateway API's resource. Two fields are used, so its Go types are not imported.
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

// proxied returns an address with the mode Proxy, and without the ports of the Service that it was
// copied from. Clients in the cluster must also reach the VIP through the gateways: with the
// default mode VIP, kube-proxy would redirect their packets to the endpoints of the Service.
func proxied(ingress corev1.LoadBalancerIngress) corev1.LoadBalancerIngress {
	ingress.IPMode, ingress.Ports = nil, nil
	if ingress.IP != "" {
		mode := corev1.LoadBalancerIPModeProxy
		ingress.IPMode = &mode
	}
	return ingress
}

// published returns the addresses that a Trench publishes, and the objects that get them, so far.
func (sources *sources) published(t *v1alpha1.Trench) published {
	var p published
	spec := t.Spec.Publish
	if spec == nil {
		return p
	}
	// A source that cannot be read is a problem of the Trench; one that is not listed yet is none.
	for _, key := range needed(t) {
		switch synced, err := sources.followers[key].State(); {
		case err != nil:
			p.problems = append(p.problems, unreadable(key, err))
		case !synced:
			p.pending = true
		}
	}
	// Without addresses to publish, addresses that another controller wrote stay.
	p.replaces = spec.FromService != "" || len(spec.Addresses) > 0
	if spec.FromService != "" {
		sources.copyService(&p, fromService(t))
	}
	for _, a := range spec.Addresses {
		if v1alpha1.PublishedAddress(a) { // the translation reports invalid addresses
			p.addresses = append(p.addresses, ingressOf(a))
		}
	}
	// Two Trenches of one class would overwrite each other's addresses: only the oldest one publishes.
	if class := spec.IngressClass; class != "" && !sources.held(&p, t, "ingressClass", class) {
		for _, namespace := range t.Namespaces() {
			for _, object := range sources.list(source{resource: ingresses, namespace: namespace}) {
				if ingress, err := convert[networkingv1.Ingress](object); err == nil && classOf(ingress) == class {
					p.ingresses = append(p.ingresses, ingress)
				}
			}
		}
	}
	if class := spec.GatewayClass; class != "" && !sources.held(&p, t, "gatewayClass", class) {
		for _, namespace := range t.Namespaces() {
			for _, object := range sources.list(source{resource: gateways, namespace: namespace}) {
				if name, _, _ := unstructured.NestedString(object.Object, "spec", "gatewayClassName"); name == class {
					p.gateways = append(p.gateways, object)
				}
			}
		}
	}
	sources.logProblems(p)
	return p
}

// copyService adds the addresses of spec.publish.fromService.
func (sources *sources) copyService(published *published, key source) {
	list := sources.list(key)
	for _, object := range list {
		if service, err := convert[corev1.Service](object); err == nil {
			for _, ingress := range service.Status.LoadBalancer.Ingress {
				published.addresses = append(published.addresses, proxied(ingress))
			}
		}
	}
	name := key.namespace + "/" + key.name
	synced, err := sources.followers[key].State()
	switch {
	case !synced || err != nil || len(published.addresses) > 0:
	case len(list) == 0:
		published.problems = append(published.problems, publishProblem{
			reasonSourceMissing, "Service " + name + " of spec.publish.fromService does not exist: " +
				"create it, or correct the name",
		})
	default:
		published.problems = append(published.problems, publishProblem{
			reasonSourceEmpty, "Service " + name + " of spec.publish.fromService has no address in its status yet: " +
				"see the controller of its load balancer",
		})
	}
}

// held reports whether an older Trench publishes for the same class in a common namespace, because
// the two would overwrite each other's addresses. It returns true until they are listed.
func (sources *sources) held(published *published, t *v1alpha1.Trench, field, class string) bool {
	trenches := source{resource: v1alpha1.Resource, namespace: t.Namespace}
	if synced, _ := sources.followers[trenches].State(); !synced {
		return true
	}
	for _, object := range sources.list(trenches) {
		other, err := v1alpha1.FromUnstructured(object)
		if err != nil || other.Name == t.Name || other.Spec.Publish == nil {
			continue
		}
		theirs := other.Spec.Publish.IngressClass
		if field == "gatewayClass" {
			theirs = other.Spec.Publish.GatewayClass
		}
		common := slices.ContainsFunc(t.Namespaces(), func(n string) bool { return slices.Contains(other.Namespaces(), n) })
		older := cmp.Or(other.CreationTimestamp.Compare(t.CreationTimestamp.Time), cmp.Compare(other.Name, t.Name)) < 0
		if theirs == class && common && older {
			published.problems = append(published.problems, publishProblem{reasonClassHeld, fmt.Sprintf(
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
func (sources *sources) logProblems(published published) {
	// Until every source is listed, the problems are incomplete.
	if published.pending {
		return
	}
	text := published.text()
	switch {
	case text == sources.logged:
	case text == "":
		sources.log.Info("publication of addresses complete")
	default:
		sources.log.Warn("publication of addresses incomplete", "reason", published.problems[0].reason, "error", text)
	}
	sources.logged = text
}

func (published published) text() string {
	var lines []string
	for _, problem := range published.problems {
		lines = append(lines, problem.message)
	}
	return listed(lines)
}

// classOf returns the class of an Ingress. The annotation takes precedence over the field, as in
// most controllers: the field may have been added later for a different controller.
func classOf(ingress *networkingv1.Ingress) string {
	if class := ingress.Annotations["kubernetes.io/ingress.class"]; class != "" {
		return class
	}
	if class := ingress.Spec.IngressClassName; class != nil {
		return *class
	}
	return ""
}

// of returns the addresses to publish for VIPs, else the live ones: addresses are never cleared.
func (published published) of(vips []vip.VIP, live []corev1.LoadBalancerIngress) []corev1.LoadBalancerIngress {
	addresses := published.addresses
	if !published.replaces {
		addresses = nil
		for _, v := range vips {
			// The status of a Service holds addresses, not prefixes.
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
func (published published) refused(failing map[types.UID]error) published {
	var refusals []error
	look := func(uid types.UID) {
		if err := failing[uid]; answered(err) {
			refusals = append(refusals, err)
		}
	}
	for _, ingress := range published.ingresses {
		look(ingress.UID)
	}
	for _, object := range published.gateways {
		look(object.GetUID())
	}
	if len(refusals) > 0 {
		message := fmt.Sprintf("the API server refuses the status of %d objects: %v", len(refusals), refusals[0])
		published.problems = append(slices.Clone(published.problems), publishProblem{reasonStatusRefused, message})
	}
	return published
}

// condition returns the condition Published of a Trench with a verdict, or nil without
// spec.publish. It keeps the live condition until every source is listed, so that a new leader
// does not repeat the Events of the previous one.
func (published published) condition(t *v1alpha1.Trench, verdict translation.Verdict) *metav1.Condition {
	if t.Spec.Publish == nil {
		return nil
	}
	// False until every row below is passed, the strongest reason first.
	condition := &metav1.Condition{
		Type: v1alpha1.Published, Status: metav1.ConditionFalse,
		ObservedGeneration: verdict.Generation,
	}
	if !verdict.Accepted {
		condition.Reason, condition.Message = notAccepted, "the Trench is not accepted: the addresses that are published stay"
		return condition
	}
	if published.pending {
		return find(t.Status.Conditions, v1alpha1.Published)
	}
	// The translation finds invalid addresses. Clone: the slice belongs to all evaluations.
	for _, problem := range verdict.Problems {
		if problem.Reason == translation.ReasonAddressNotPublished {
			published.problems = append(slices.Clone(published.problems), publishProblem{problem.Reason, problem.Message})
		}
	}
	if len(published.problems) > 0 {
		condition.Reason, condition.Message = published.problems[0].reason, published.text()
		return condition
	}
	var texts []string
	for _, ingress := range published.addresses {
		texts = append(texts, strings.Trim(ingress.IP+" "+ingress.Hostname, " "))
	}
	condition.Status, condition.Reason = metav1.ConditionTrue, reasonPublished
	condition.Message = listedBy(texts, ", ") + " for Services"
	if class := t.Spec.Publish.IngressClass; class != "" {
		condition.Message += fmt.Sprintf(", Ingresses of class %s (%d)", class, len(published.ingresses))
	}
	if class := t.Spec.Publish.GatewayClass; class != "" {
		condition.Message += fmt.Sprintf(", Gateways of class %s (%d)", class, len(published.gateways))
	}
	return condition
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

func ingressStatus(ingress *networkingv1.Ingress, published published) wanted {
	w := wanted{resource: ingresses, object: reference(networkingv1.SchemeGroupVersion.WithKind("Ingress"), ingress)}
	var addresses []networkingv1.IngressLoadBalancerIngress
	for _, a := range published.addresses {
		addresses = append(addresses, networkingv1.IngressLoadBalancerIngress{IP: a.IP, Hostname: a.Hostname})
	}
	// evaluate omits an empty status, so the live addresses stay.
	if len(addresses) == 0 {
		return w
	}
	w.addresses = text(addresses)
	w.addressesDiffer = !equality.Semantic.DeepEqual(addresses, ingress.Status.LoadBalancer.Ingress)
	w.status = loadBalancer(addresses)
	return w
}

// gatewayAddress is an element of status.addresses of a Gateway.
type gatewayAddress struct {
	Type  string `json:"type"`
	Value string `json:"value"`
}

func gatewayStatus(object *unstructured.Unstructured, published published) wanted {
	w := wanted{resource: gateways, object: reference(gateways.GroupVersion().WithKind("Gateway"), object)}
	var addresses []gatewayAddress
	for _, ingress := range published.addresses {
		if ingress.IP != "" {
			addresses = append(addresses, gatewayAddress{"IPAddress", ingress.IP})
		}
		if ingress.Hostname != "" {
			addresses = append(addresses, gatewayAddress{"Hostname", ingress.Hostname})
		}
	}
	// evaluate omits an empty status, so the live addresses stay.
	if len(addresses) == 0 {
		return w
	}
	addresses = addresses[:min(len(addresses), maxGatewayAddresses)]
	var live struct {
		Status struct {
			Addresses []gatewayAddress `json:"addresses"`
		} `json:"status"`
	}
	b, err := json.Marshal(object.Object)
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
func leftStatus(service *corev1.Service) (wanted, bool) {
	const prefix = v1alpha1.Group + "/"
	class := service.Spec.LoadBalancerClass
	if service.Spec.Type == corev1.ServiceTypeLoadBalancer && class != nil && strings.HasPrefix(*class, prefix) {
		return wanted{}, false // the leader of its Trench writes them
	}
	has := slices.ContainsFunc(service.Status.Conditions, func(condition metav1.Condition) bool {
		return strings.HasPrefix(condition.Type, prefix)
	})
	return wanted{
		resource: services, object: reference(corev1.SchemeGroupVersion.WithKind("Service"), service),
		status: map[string]any{}, conditions: "none", conditionsDiffer: true,
	}, has
}
