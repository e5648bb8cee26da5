package translation

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// maxProblems is the maximum number of listed problems of a Service.
const maxProblems = 20

// addTargets adds the targets of a Service to its stream, and returns the problems of omitted ones.
func (state *translator) addTargets(service *corev1.Service, stream *trench.Stream) ([]Problem, *refusal) {
	list := state.endpointsOf(service)
	problems := warnings(service)
	if len(list) == 0 && len(service.Spec.Selector) > 0 {
		problems = append(problems, Problem{reference(service), ReasonNoPods, message(
			"no Pod in namespace %s has the labels %s and %s=%s: add the latter to the template of the Pods",
			service.Namespace, labels.Set(service.Spec.Selector), v1alpha1.TrenchLabel, state.settings.trench.Name)})
	}
	if suggested := suggestCheck(service, stream, list); suggested != "" {
		problems = append(problems, Problem{reference(service), ReasonTCPCheck, message(
			"a hung application passes its TCP check: write annotation %s, such as %s, as in the readinessProbe of the Pods",
			v1alpha1.CheckAnnotation, suggested)})
	}
	list, translated := withPorts(service, list)
	problems = append(problems, translated...)
	// One is enough: Pods of another namespace must not fill the list.
	if i := slices.IndexFunc(list, func(endpoint *endpoint) bool { return endpoint.shared != nil }); i >= 0 {
		problems = append(problems, *list[i].shared)
	}
	has, names := [len(vip.Families)]bool{}, map[string]bool{}
	for _, endpoint := range list {
		// Pods that are not ready count: the warning below is about Pods that can never serve a VIP.
		for family, address := range endpoint.ips {
			has[family] = has[family] || address.IsValid()
		}
		// A terminating Pod is not repaired any more.
		if !endpoint.terminating {
			problems = append(problems, endpoint.problems...)
		}
		if endpoint.ips == (addresses{}) || !endpoint.ready && !endpoint.terminating &&
			!service.Spec.PublishNotReadyAddresses {
			continue
		}
		// A target without a checked address would never become ready.
		checked := func(family vip.Family) bool {
			return endpoint.ips[family].IsValid() && stream.Check.Families.Has(family)
		}
		if !slices.ContainsFunc(vip.Families[:], checked) {
			problems = append(problems, Problem{endpoint.object, ReasonNotChecked, fmt.Sprintf(
				"%s %s has no address of the family that is checked, %s: give it one, or let the check have families: both",
				endpoint.object.Kind, endpoint.name, stream.Check.Families)})
			continue
		}
		// The API server has one Pod for each name; files on a command line may have two.
		name := fileName(endpoint.name)
		if names[name] {
			continue
		}
		names[name] = true
		stream.Targets = append(stream.Targets,
			trench.Target{Name: name, IPs: endpoint.ips.list(), Terminating: endpoint.terminating})
	}
	// Without a Pod that listens on the port the Service is wrong, and a new port waits for a target:
	// until then the last form may serve.
	i := slices.IndexFunc(problems, func(problem Problem) bool { return problem.Reason == ReasonPortTranslation })
	if i >= 0 && len(stream.Targets) == 0 && (len(list) == 0 || renamed(service)) {
		return nil, &refusal{ReasonPortTranslation, problems[i].Message}
	}
	// Without any address the problem is another one, such as missing Pods.
	if has != [len(vip.Families)]bool{} {
		for _, served := range stream.VIPs {
			if !has[served.Family()] {
				problems = append(problems, Problem{reference(service), ReasonNoAddressOfFamily, fmt.Sprintf(
					"%s is not advertised: no Pod or endpoint has an address of its family, %s: "+
						"give them one in the network of the Trench, or remove the VIP", served, served.Family())})
			}
		}
	}
	if more := len(problems) - maxProblems; more > 0 {
		problems = append(problems[:maxProblems:maxProblems],
			Problem{reference(service), ReasonMore, fmt.Sprintf("%d more problems are not listed: repair these first", more)})
	}
	return problems, nil
}

// endpointsOf returns the endpoints of a Service, sorted by name: the Pods that its selector
// selects, or the endpoints of its EndpointSlices if it has no selector.
func (state *translator) endpointsOf(service *corev1.Service) []*endpoint {
	if len(service.Spec.Selector) == 0 {
		return state.sliceEndpoints(service)
	}
	var lists [][]*endpoint
	for key, value := range service.Spec.Selector {
		lists = append(lists, state.pods[label{service.Namespace, key, value}])
	}
	// Many Services may have a label in common: the shortest list has fewest of their Pods.
	list := slices.MinFunc(lists, func(a, b []*endpoint) int { return cmp.Compare(len(a), len(b)) })
	if len(service.Spec.Selector) == 1 {
		return list
	}
	selector := labels.SelectorFromSet(service.Spec.Selector)
	var selected []*endpoint
	for _, endpoint := range list {
		if selector.Matches(labels.Set(endpoint.pod.Labels)) {
			selected = append(selected, endpoint)
		}
	}
	return selected
}

// withPorts returns the endpoints that have the ports of a Service, and the problems of the
// rejected endpoints. A named targetPort may have a different number in each Pod.
func withPorts(service *corev1.Service, list []*endpoint) ([]*endpoint, []Problem) {
	named := slices.DeleteFunc(slices.Clone(service.Spec.Ports), func(port corev1.ServicePort) bool {
		return port.TargetPort.Type != intstr.String
	})
	// Endpoints of EndpointSlices have no Pod; sliceEndpoints compares their ports.
	if len(named) == 0 || len(service.Spec.Selector) == 0 {
		return list, nil
	}
	var having []*endpoint
	var problems []Problem
	for _, endpoint := range list {
		message := ""
		for _, port := range named {
			number := containerPort(endpoint.pod, port)
			switch {
			case number == 0:
				message = fmt.Sprintf("targetPort %q is no port of Pod %s: name a port of its containers, "+
					"or write the number %d", port.TargetPort.StrVal, endpoint.name, port.Port)
			case number != port.Port:
				message = fmt.Sprintf("port %d has the targetPort %q, which is %d in Pod %s, and vipgate does not "+
					"translate ports: let the application listen on port %d, or set the port to %d",
					port.Port, port.TargetPort.StrVal, number, endpoint.name, port.Port, number)
			}
		}
		if message == "" {
			having = append(having, endpoint)
		} else {
			problems = append(problems, Problem{endpoint.object, ReasonPortTranslation, message})
		}
	}
	return having, problems
}

// containerPort returns the number of a named targetPort in a Pod, or 0 if no container has it. It
// searches init containers, too, because sidecars are among them.
func containerPort(pod *corev1.Pod, port corev1.ServicePort) int32 {
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for _, container := range containers {
			for _, candidate := range container.Ports {
				if candidate.Name == port.TargetPort.StrVal && protocol(candidate.Protocol) == protocol(port.Protocol) {
					return candidate.ContainerPort
				}
			}
		}
	}
	return 0
}
