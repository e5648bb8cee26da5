package translation

import (
	"cmp"
	"encoding/json"
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
func (byFamily addresses) list() []netip.Addr {
	return slices.DeleteFunc(byFamily[:], func(address netip.Addr) bool { return !address.IsValid() })
}

// endpoint is a potential target: a Pod, or endpoints of EndpointSlices.
type endpoint struct {
	object      corev1.ObjectReference
	pod         *corev1.Pod // nil for an endpoint of an EndpointSlice
	name        string
	ips         addresses
	ready       bool
	terminating bool
	selected    bool // by a Service; of Pods only
	problems    []Problem
	shared      *Problem // an address that Pods of several namespaces have
}

func (endpoint *endpoint) problem(reason, format string, args ...any) {
	endpoint.problems = append(endpoint.problems, Problem{endpoint.object, reason, message(format, args...)})
}

type label struct{ namespace, key, value string }

// readPods reads the Pods of the trench, and indexes them by their labels: comparing each Pod with
// each Service is too slow with thousands of both.
func (state *translator) readPods(pods []*corev1.Pod, services []*corev1.Service) {
	state.pods = map[label][]*endpoint{}
	byAddress := [len(vip.Families)]map[netip.Addr][]*endpoint{{}, {}}
	// In this order each list of the index has its Pods.
	ordered := slices.SortedFunc(slices.Values(pods), func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), Older(a, b))
	})
	for _, pod := range ordered {
		if pod.Labels[v1alpha1.TrenchLabel] != state.settings.trench.Name ||
			!slices.Contains(state.settings.namespaces, pod.Namespace) {
			continue
		}
		found := state.readPod(pod)
		for family, address := range found.ips {
			if address.IsValid() {
				byAddress[family][address] = append(byAddress[family][address], found)
			}
		}
		for key, value := range pod.Labels {
			index := label{pod.Namespace, key, value}
			state.pods[index] = append(state.pods[index], found)
		}
	}
	for _, service := range services {
		if len(service.Spec.Selector) > 0 {
			for _, found := range state.endpointsOf(service) {
				found.selected = true
			}
		}
	}
	for family, having := range byAddress {
		for address, list := range having {
			if len(list) > 1 {
				assign(list, family, address)
			}
		}
	}
}

// assign leaves an address to one Pod of each namespace. A CNI plugin may assign the address of a
// lost or terminating Pod again, so a Ready Pod has it before others, and a younger one before an
// older one, as in kube-proxy. A Pod without a Service takes no address from a target.
//
// Pods of different namespaces take nothing from each other, because a Pod's annotations may be
// forged: an address identifies a target within its stream, and a Service has Pods of its namespace.
func assign(list []*endpoint, family int, address netip.Addr) {
	rank := func(found *endpoint) (rank int) {
		if !found.selected {
			rank += 2
		}
		if !found.ready || found.terminating {
			rank++
		}
		return rank
	}
	slices.SortFunc(list, func(a, b *endpoint) int {
		return cmp.Or(cmp.Compare(a.pod.Namespace, b.pod.Namespace), cmp.Compare(rank(a), rank(b)), Older(b.pod, a.pod))
	})
	first, last := list[0].pod.Namespace, list[len(list)-1].pod.Namespace
	var holder *endpoint
	for _, found := range list {
		if holder != nil && holder.pod.Namespace == found.pod.Namespace {
			found.problem(ReasonAddressTaken, "Pod %s has address %s, which belongs to Pod %s/%s: "+
				"give each Pod an address of its own", found.pod.Name, address, holder.pod.Namespace, holder.pod.Name)
			found.ips[family] = netip.Addr{}
			continue
		}
		holder = found
		other := first
		if other == found.pod.Namespace {
			other = last
		}
		if other != found.pod.Namespace {
			found.shared = &Problem{found.object, ReasonAddressShared, message("Pod %s has address %s, which a Pod "+
				"in namespace %s has, too: give each Pod an address of its own", found.pod.Name, address, other)}
		}
	}
}

// Older compares objects by age, then by name.
func Older[T metav1.Object](a, b T) int {
	x, y := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(x.Compare(y.Time), cmp.Compare(a.GetNamespace(), b.GetNamespace()),
		cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetUID(), b.GetUID()))
}

// readPod returns the endpoint of a Pod. A Pod that is not running has no address.
func (state *translator) readPod(pod *corev1.Pod) *endpoint {
	found := &endpoint{
		object: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		},
		pod: pod, name: pod.Name, terminating: pod.DeletionTimestamp != nil,
	}
	// The address of a finished Pod may belong to a new Pod.
	if pod.Status.Phase != corev1.PodRunning {
		return found
	}
	found.ready = IsReady(pod)
	for _, text := range state.addressTexts(found) {
		address, err := netip.ParseAddr(text)
		if err != nil {
			found.problem(ReasonAddressRefused, "Pod %s has address %q, which is none: see its annotation %s",
				pod.Name, text, networkStatus)
			continue
		}
		if found.ips[vip.FamilyOf(address)].IsValid() {
			continue // use only the first address of a family
		}
		if problem := state.settings.refuses(pod.Namespace, address); problem != "" {
			found.problem(ReasonAddressRefused, "Pod %s has address %s, which %s", pod.Name, address, problem)
			continue
		}
		found.ips[vip.FamilyOf(address)] = address
	}
	return found
}

// IsReady reports whether a Pod has the condition Ready.
func IsReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(condition corev1.PodCondition) bool {
		return condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue
	})
}

// addressTexts returns the addresses of a Pod in the Trench's network.
func (state *translator) addressTexts(endpoint *endpoint) []string {
	var texts []string
	network := state.settings.network
	// Without spec.network the targets are in the pod network.
	if network == "" {
		for _, podIP := range endpoint.pod.Status.PodIPs {
			texts = append(texts, podIP.IP)
		}
		return texts
	}
	// The status of a Pod lists only the pod network; Multus records the additional networks.
	annotation, ok := endpoint.pod.Annotations[networkStatus]
	if !ok {
		endpoint.problem(ReasonNetworkStatusMissing, "Pod %s has no annotation %s: add k8s.v1.cni.cncf.io/networks: %s "+
			"to the annotations of its template, and see that Multus runs on node %s",
			endpoint.pod.Name, networkStatus, network, endpoint.pod.Spec.NodeName)
		return nil
	}
	var interfaces []struct {
		Name string   `json:"name"`
		IPs  []string `json:"ips"`
	}
	if err := json.Unmarshal([]byte(annotation), &interfaces); err != nil {
		endpoint.problem(ReasonNetworkStatusMissing, "Pod %s has an annotation %s that cannot be read (%s): "+
			"create the Pod again, so that Multus writes it", endpoint.pod.Name, networkStatus, problemOf(err))
		return nil
	}
	// Multus lists all networks of the Pod, also the one of the cluster.
	attached := false
	for _, attachment := range interfaces {
		if attachment.Name == network {
			texts, attached = append(texts, attachment.IPs...), true
		}
	}
	switch {
	case !attached:
		endpoint.problem(ReasonNetworkMissing, "Pod %s is not attached to network %s: add k8s.v1.cni.cncf.io/networks: %s "+
			"to the annotations of its template", endpoint.pod.Name, network, network)
	case len(texts) == 0:
		endpoint.problem(ReasonNetworkMissing, "Pod %s has no address in network %s: let the IPAM of the "+
			"NetworkAttachmentDefinition assign one", endpoint.pod.Name, network)
	}
	return texts
}
