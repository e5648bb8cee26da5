package translation

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/vip"
)

// networkStatus is the annotation in which Multus lists the addresses of a Pod.
const networkStatus = "k8s.v1.cni.cncf.io/network-status"

// addresses holds at most one address per family; the zero Addr means none.
type addresses [len(vip.Families)]netip.Addr

// list returns the addresses that exist.
func (a addresses) list() []netip.Addr {
	return slices.DeleteFunc(a[:], func(x netip.Addr) bool { return !x.IsValid() })
}

// endpoint is a potential target: a Pod, or endpoints of EndpointSlices.
type endpoint struct {
	object      corev1.ObjectReference
	pod         *corev1.Pod // nil for an endpoint of an EndpointSlice
	name        string
	ips         addresses
	ready       bool
	terminating bool
	problems    []Problem
}

func (e *endpoint) problem(reason, format string, args ...any) {
	e.problems = append(e.problems, Problem{e.object, reason, message(format, args...)})
}

// label is a label of an object in a namespace.
type label struct{ namespace, key, value string }

// readPods returns the Pods of the trench, indexed by the labels that are the first key of a
// Service's selector.
func (t *translator) readPods(pods []*corev1.Pod, services []*corev1.Service) map[label][]*endpoint {
	wanted := map[string]bool{}
	for _, s := range services {
		if len(s.Spec.Selector) > 0 {
			wanted[firstKey(s.Spec.Selector)] = true
		}
	}
	byLabel := map[label][]*endpoint{}
	holders := map[netip.Addr]*corev1.Pod{}
	var all []*endpoint
	for _, pod := range pods {
		if pod.Labels[v1alpha1.TrenchLabel] != t.settings.trench.Name ||
			!slices.Contains(t.settings.namespaces, pod.Namespace) {
			continue
		}
		e := t.readPod(pod)
		all = append(all, e)
		for _, a := range e.ips {
			if holder := holders[a]; a.IsValid() && (holder == nil || Older(pod, holder) < 0) {
				holders[a] = pod
			}
		}
		for key, value := range pod.Labels {
			if wanted[key] {
				l := label{pod.Namespace, key, value}
				byLabel[l] = append(byLabel[l], e)
			}
		}
	}
	for _, e := range all {
		for i, a := range e.ips {
			if holder := holders[a]; a.IsValid() && holder != e.pod {
				e.problem(ReasonAddressTaken, "Pod %s has address %s, which belongs to the older Pod %s/%s: "+
					"give each Pod an address of its own", e.pod.Name, a, holder.Namespace, holder.Name)
				e.ips[i] = netip.Addr{}
			}
		}
	}
	for _, list := range byLabel {
		slices.SortFunc(list, func(a, b *endpoint) int {
			return cmp.Or(cmp.Compare(a.pod.Name, b.pod.Name), Older(a.pod, b.pod))
		})
	}
	return byLabel
}

// firstKey returns the alphabetically first key of a selector.
func firstKey(selector map[string]string) string {
	return slices.Min(slices.Collect(maps.Keys(selector)))
}

// Older compares objects by age, then by name.
func Older[T metav1.Object](a, b T) int {
	x, y := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(x.Compare(y.Time), cmp.Compare(a.GetNamespace(), b.GetNamespace()),
		cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetUID(), b.GetUID()))
}

// readPod returns the endpoint of a Pod. A Pod that is not running has no address.
func (t *translator) readPod(pod *corev1.Pod) *endpoint {
	e := &endpoint{
		object: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		},
		pod: pod, name: pod.Name, terminating: pod.DeletionTimestamp != nil,
	}
	if pod.Status.Phase != corev1.PodRunning {
		return e
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			e.ready = c.Status == corev1.ConditionTrue
		}
	}
	for _, text := range t.addressTexts(e) {
		a, err := netip.ParseAddr(text)
		if err != nil {
			e.problem(ReasonAddressRefused, "Pod %s has address %q, which is none: see its annotation %s",
				pod.Name, text, networkStatus)
			continue
		}
		if e.ips[vip.FamilyOf(a)].IsValid() {
			continue // use only the first address of a family
		}
		if problem := t.settings.refuses(a); problem != "" {
			e.problem(ReasonAddressRefused, "Pod %s has address %s, which %s", pod.Name, a, problem)
			continue
		}
		e.ips[vip.FamilyOf(a)] = a
	}
	return e
}

// addressTexts returns the addresses of a Pod in the Trench's network.
func (t *translator) addressTexts(e *endpoint) []string {
	var texts []string
	network := t.settings.network
	if network == "" {
		for _, ip := range e.pod.Status.PodIPs {
			texts = append(texts, ip.IP)
		}
		return texts
	}
	annotation, ok := e.pod.Annotations[networkStatus]
	if !ok {
		e.problem(ReasonNetworkStatusMissing, "Pod %s has no annotation %s: add k8s.v1.cni.cncf.io/networks: %s "+
			"to the annotations of its template, and see that Multus runs on node %s",
			e.pod.Name, networkStatus, network, e.pod.Spec.NodeName)
		return nil
	}
	var interfaces []struct {
		Name string   `json:"name"`
		IPs  []string `json:"ips"`
	}
	if err := json.Unmarshal([]byte(annotation), &interfaces); err != nil {
		e.problem(ReasonNetworkStatusMissing, "Pod %s has an annotation %s that cannot be read (%s): "+
			"create the Pod again, so that Multus writes it", e.pod.Name, networkStatus, problemOf(err))
		return nil
	}
	attached := false
	for _, i := range interfaces {
		if i.Name == network {
			texts, attached = append(texts, i.IPs...), true
		}
	}
	switch {
	case !attached:
		e.problem(ReasonNetworkMissing, "Pod %s is not attached to network %s: add k8s.v1.cni.cncf.io/networks: %s "+
			"to the annotations of its template", e.pod.Name, network, network)
	case len(texts) == 0:
		e.problem(ReasonNetworkMissing, "Pod %s has no address in network %s: let the IPAM of the "+
			"NetworkAttachmentDefinition assign one", e.pod.Name, network)
	}
	return texts
}
