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

// wanted is the desired status of an object.
type wanted struct {
	resource schema.GroupVersionResource
	object   corev1.ObjectReference // with the resource version of the evaluated object
	status   map[string]any         // all fields that this field manager owns
	// kept is status with the live addresses of the object; nil without addresses or conditions.
	kept map[string]any
	// conditions and addresses are the two parts of status as text, without times, so that
	// evaluations with the same result are equal. The next two report whether the live object
	// differs.
	conditions, addresses             string
	conditionsDiffer, addressesDiffer bool
	events                            []event // sent after the write
}

// evaluate returns the desired status of the objects, the Trench first.
func evaluate(in Input, published published, now metav1.Time) []wanted {
	var all []wanted
	pods := readReports(in.Siblings, in.Reports)
	trench, err := decode(in)
	if err != nil || trench == nil {
		return nil // the API server does not accept a Trench that cannot be decoded
	}
	all = append(all, trenchStatus(in, trench, pods, published, now))
	live := map[string]*corev1.Service{}
	for _, s := range in.Objects.Services {
		live[s.Namespace+"/"+s.Name] = s
	}
	for _, v := range in.Result.Services {
		if s := live[v.Object.Namespace+"/"+v.Object.Name]; s != nil {
			all = append(all, serviceStatus(s, v, pods, published, now))
			delete(live, v.Object.Namespace+"/"+v.Object.Name)
		}
	}
	if in.Result.Trench.Accepted { // a refused Trench keeps the published addresses, as for Services
		for _, i := range published.ingresses {
			all = append(all, ingressStatus(i, published))
		}
		for _, u := range published.gateways {
			all = append(all, gatewayStatus(u, published))
		}
	}
	all = slices.DeleteFunc(all, func(w wanted) bool { return len(w.status) == 0 })
	for _, name := range slices.Sorted(maps.Keys(live)) {
		if w, has := leftStatus(live[name]); has {
			all = append(all, w)
		}
	}
	return all
}

func decode(in Input) (*v1alpha1.Trench, error) {
	if in.Objects.Trench == nil {
		return nil, nil
	}
	return v1alpha1.FromUnstructured(in.Objects.Trench)
}

func trenchStatus(in Input, t *v1alpha1.Trench, pods reports, p published, now metav1.Time) wanted {
	v := in.Result.Trench
	accepted := acceptance(v1alpha1.Accepted, v)
	if len(v.Problems) > 0 {
		accepted.Message = strings.TrimPrefix(accepted.Message+"; "+problems(v), "; ")
	}
	vips := vip.NewSet(streamVIPs(t.Spec.Streams)...)
	for _, s := range in.Result.Services {
		for _, v := range s.VIPs {
			vips[v] = struct{}{}
		}
	}
	if !v.Accepted {
		vips = pods.served() // the previous trench file is in force
	}
	advertised := pods.advertised(vips.Sorted())
	advertised.Type, advertised.ObservedGeneration = v1alpha1.Advertised, v.Generation

	w := wanted{resource: v1alpha1.Resource, object: reference(v1alpha1.Kind, t)}
	conditions := []metav1.Condition{accepted, advertised}
	shown := p.condition(t, v)
	if shown != nil {
		conditions = append(conditions, *shown)
	}
	w.conditions = fmt.Sprint(v.Generation, conditions)
	w.conditionsDiffer = settle(conditions, t.Status.Conditions, now) || t.Status.ObservedGeneration != v.Generation
	w.status = map[string]any{"observedGeneration": v.Generation, "conditions": conditions}
	w.events = append(changes(v, conditions, t.Status.Conditions),
		publishEvents(shown, find(t.Status.Conditions, v1alpha1.Published))...)
	return w
}

// streamVIPs returns the VIPs of spec.streams.
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

func serviceStatus(s *corev1.Service, v translation.ServiceVerdict, pods reports, p published, now metav1.Time) wanted {
	const prefix = v1alpha1.Group + "/"
	serves := v.Stream != "" // a refused Service keeps its last accepted stream
	advertised := metav1.Condition{
		Status: metav1.ConditionFalse, Reason: notAccepted, Message: "the Service is not accepted",
	}
	ready := metav1.Condition{Status: metav1.ConditionUnknown, Reason: notAccepted, Message: advertised.Message}
	if serves {
		advertised, ready = pods.advertised(v.VIPs), pods.targets(v.VIPs, v.Targets)
	}
	advertised.Type, advertised.ObservedGeneration = prefix+v1alpha1.Advertised, v.Generation
	ready.Type, ready.ObservedGeneration = prefix+v1alpha1.TargetsReady, v.Generation

	live := s.Status.LoadBalancer.Ingress
	addresses := live
	if serves {
		addresses = p.of(v.VIPs, live)
	}
	w := wanted{resource: services, object: reference(corev1.SchemeGroupVersion.WithKind("Service"), s)}
	conditions := []metav1.Condition{
		acceptance(prefix+v1alpha1.Accepted, v.Verdict), advertised,
		targets(prefix+v1alpha1.TargetsAccepted, v.Verdict, ready), ready,
	}
	if last := lastAccepted(s, v); last != nil {
		conditions = append(conditions, *last)
	}
	w.conditions, w.addresses = fmt.Sprint(conditions), text(addresses)
	w.conditionsDiffer = settle(conditions, s.Status.Conditions, now)
	w.addressesDiffer = !equality.Semantic.DeepEqual(addresses, live)
	w.status, w.kept = loadBalancer(addresses), loadBalancer(live)
	w.status["conditions"], w.kept["conditions"] = conditions, conditions
	w.events = changes(v.Verdict, conditions, s.Status.Conditions)
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

func reference(kind schema.GroupVersionKind, o metav1.Object) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: kind.GroupVersion().String(), Kind: kind.Kind, Namespace: o.GetNamespace(), Name: o.GetName(),
		UID: o.GetUID(), ResourceVersion: o.GetResourceVersion(),
	}
}
