package publication

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
)

var (
	services  = corev1.SchemeGroupVersion.WithResource("services")
	ingresses = networkingv1.SchemeGroupVersion.WithResource("ingresses")
)

// Input holds the inputs of status: the objects, their translation, and the pods that run lb and
// frontend. The objects are not modified.
type Input struct {
	Objects  translation.Objects
	Result   translation.Result
	Siblings []*corev1.Pod
	// Reports maps the UID of a sibling to its report. The publisher sets it.
	Reports map[types.UID]Reported
}

type wanted struct {
	resource schema.GroupVersionResource
	object   corev1.ObjectReference // with the resource version of the evaluated object
	status   map[string]any         // all fields that this field manager owns
	// kept is status with the live addresses of the object; nil without addresses or conditions.
	kept map[string]any
	// conditions and addresses are the two parts of status as text, without times, so that evaluations
	// with the same result are equal. The next two report whether the live object differs.
	conditions, addresses             string
	conditionsDiffer, addressesDiffer bool
	onlyTargets                       bool    // reports whether only the record of targets differs
	events                            []event // sent after the write
}

// evaluate returns the desired status of the objects, the Trench first.
func evaluate(input Input, published published, now metav1.Time) []wanted {
	var all []wanted
	pods := readReports(input.Siblings, input.Reports)
	trench, err := decode(input)
	if err != nil || trench == nil {
		return nil // the API server does not accept a Trench that cannot be decoded
	}
	all = append(all, trenchStatus(input, trench, pods, published, now))
	live := map[string]*corev1.Service{}
	for _, service := range input.Objects.Services {
		live[service.Namespace+"/"+service.Name] = service
	}
	// Services without a verdict remain in live: they left the trench.
	for _, verdict := range input.Result.Services {
		if service := live[verdict.Object.Namespace+"/"+verdict.Object.Name]; service != nil {
			all = append(all, serviceStatus(service, verdict, pods, published, now))
			delete(live, verdict.Object.Namespace+"/"+verdict.Object.Name)
		}
	}
	if input.Result.Trench.Accepted { // a refused Trench keeps the published addresses, as for Services
		for _, ingress := range published.ingresses {
			all = append(all, ingressStatus(ingress, published))
		}
		for _, object := range published.gateways {
			all = append(all, gatewayStatus(object, published))
		}
	}
	all = slices.DeleteFunc(all, func(w wanted) bool { return len(w.status) == 0 })
	// A Service that left the trench loses the conditions and addresses of this field manager.
	for _, name := range slices.Sorted(maps.Keys(live)) {
		if w, has := leftStatus(live[name]); has {
			all = append(all, w)
		}
	}
	return all
}

func decode(input Input) (*v1alpha1.Trench, error) {
	if input.Objects.Trench == nil {
		return nil, nil
	}
	return v1alpha1.FromUnstructured(input.Objects.Trench)
}

func trenchStatus(input Input, t *v1alpha1.Trench, pods reports, published published, now metav1.Time) wanted {
	verdict := input.Result.Trench
	accepted := acceptance(v1alpha1.Accepted, verdict)
	// Problems of an accepted Trench belong to fields that were left out, so that both are shown.
	if len(verdict.Problems) > 0 {
		accepted.Message = strings.TrimPrefix(accepted.Message+"; "+listed(lines(verdict, verdict.Problems)), "; ")
	}
	// A Service may have VIPs that no stream of the Trench lists.
	vips := vip.NewSet(streamVIPs(t.Spec.Streams)...)
	for _, s := range input.Result.Services {
		for _, v := range s.VIPs {
			vips[v] = struct{}{}
		}
	}
	if !verdict.Accepted {
		vips = pods.served() // the previous trench file is in force
	}
	advertised := pods.advertised(vips.Sorted())
	advertised.Type, advertised.ObservedGeneration = v1alpha1.Advertised, verdict.Generation

	w := wanted{resource: v1alpha1.Resource, object: reference(v1alpha1.Kind, t)}
	conditions := []metav1.Condition{accepted, advertised}
	shown := published.condition(t, verdict)
	if shown != nil {
		conditions = append(conditions, *shown)
	}
	held := pods.held(t)
	if held != nil {
		conditions = append(conditions, *held)
	}
	holders := input.Result.Holders
	if holders == nil { // a refused Trench keeps its streams
		holders = t.Status.Holders
	}
	w.conditions = fmt.Sprint(verdict.Generation, conditions, holders)
	w.conditionsDiffer = settle(conditions, t.Status.Conditions, now) ||
		t.Status.ObservedGeneration != verdict.Generation || (holders == nil) != (t.Status.Holders == nil) ||
		!equality.Semantic.DeepEqual(holders, t.Status.Holders)
	w.status = map[string]any{"observedGeneration": verdict.Generation, "conditions": conditions}
	if holders != nil {
		w.status["holders"] = holders
	}
	w.events = append(changes(verdict, conditions, t.Status.Conditions),
		publishEvents(shown, find(t.Status.Conditions, v1alpha1.Published))...)
	w.events = append(w.events, heldEvents(held, find(t.Status.Conditions, v1alpha1.Held))...)
	return w
}

func streamVIPs(streams []any) (vips []vip.VIP) {
	for _, s := range streams {
		stream, _ := s.(map[string]any)
		list, _ := stream["vips"].([]any)
		for _, x := range list {
			text, _ := x.(string)
			if v, err := vip.Parse(text); err == nil {
				vips = append(vips, v)
			}
		}
	}
	return vips
}

func serviceStatus(service *corev1.Service, verdict translation.ServiceVerdict, pods reports, published published,
	now metav1.Time,
) wanted {
	const prefix = v1alpha1.Group + "/"
	serves := verdict.Stream != "" // a refused Service keeps its last accepted stream
	advertised := metav1.Condition{
		Status: metav1.ConditionFalse, Reason: notAccepted, Message: "the Service is not accepted",
	}
	ready := metav1.Condition{Status: metav1.ConditionUnknown, Reason: notAccepted, Message: advertised.Message}
	if serves {
		advertised, ready = pods.advertised(verdict.VIPs), pods.targets(verdict.VIPs, verdict.Targets)
	}
	advertised.Type, advertised.ObservedGeneration = prefix+v1alpha1.Advertised, verdict.Generation
	ready.Type, ready.ObservedGeneration = prefix+v1alpha1.TargetsReady, verdict.Generation

	// A refused Service without a stream keeps its addresses: clients may still resolve them.
	live := service.Status.LoadBalancer.Ingress
	addresses := live
	if serves {
		addresses = published.of(verdict.VIPs, live)
	}
	w := wanted{resource: services, object: reference(corev1.SchemeGroupVersion.WithKind("Service"), service)}
	conditions := []metav1.Condition{
		acceptance(prefix+v1alpha1.Accepted, verdict.Verdict), advertised,
		targets(prefix+v1alpha1.TargetsAccepted, verdict.Verdict, ready), ready,
	}
	if last := lastAccepted(service, verdict); last != nil {
		conditions = append(conditions, *last)
	}
	// Text before settle, which copies times from the live conditions, and without the record of
	// targets, which has others until it is written: equal results must be equal.
	w.conditions, w.addresses = fmt.Sprint(conditions), text(addresses)
	sets := generations(service, verdict, now)
	if sets != nil {
		conditions = append(conditions, *sets)
	}
	w.conditionsDiffer = settle(conditions, service.Status.Conditions, now)
	w.addressesDiffer = !equality.Semantic.DeepEqual(addresses, live)
	w.onlyTargets = w.conditionsDiffer && !w.addressesDiffer && sets != nil &&
		!settle(conditions[:len(conditions)-1], service.Status.Conditions, now)
	w.status, w.kept = loadBalancer(addresses), loadBalancer(live)
	w.status["conditions"], w.kept["conditions"] = conditions, conditions
	w.events = changes(verdict.Verdict, conditions, service.Status.Conditions)
	return w
}

// text returns addresses as text that does not depend on pointers.
func text[T any](ingress []T) string {
	b, _ := json.Marshal(ingress) // cannot fail: strings and numbers
	return string(b)
}

// loadBalancer returns a status with the addresses; it is empty without addresses.
func loadBalancer[T any](ingress []T) map[string]any {
	if len(ingress) == 0 {
		return map[string]any{}
	}
	return map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}
}

func reference(kind schema.GroupVersionKind, object metav1.Object) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Namespace: object.GetNamespace(), Name: object.GetName(),
		UID: object.GetUID(), ResourceVersion: object.GetResourceVersion(),
	}
}
