package translation

import (
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

// addTargets adds the targets of a Service to its stream, and returns the problems of omitted
// ones.
func (t *translator) addTargets(s *corev1.Service, st *trench.Stream) ([]Problem, *refusal) {
	list := t.endpointsOf(s)
	problems := warnings(s)
	if len(list) == 0 && len(s.Spec.Selector) > 0 {
		problems = append(problems, Problem{reference(s), ReasonNoPods, message(
			"no Pod in namespace %s has the labels %s and %s=%s: add the latter to the template of the Pods",
			s.Namespace, labels.Set(s.Spec.Selector), v1alpha1.TrenchLabel, t.settings.trench.Name)})
	}
	list, translated := withPorts(s, list)
	if len(list) == 0 && len(translated) > 0 {
		return nil, &refusal{ReasonPortTranslation, translated[0].Message}
	}
	problems = append(problems, translated...)
	has, names := [len(vip.Families)]bool{}, map[string]bool{}
	for _, e := range list {
		for family, a := range e.ips {
			has[family] = has[family] || a.IsValid()
		}
		if !e.terminating {
			problems = append(problems, e.problems...)
		}
		if e.ips == (addresses{}) || !e.ready && !e.terminating && !s.Spec.PublishNotReadyAddresses {
			continue
		}
		checked := func(f vip.Family) bool { return e.ips[f].IsValid() && st.Check.Families.Has(f) }
		if !slices.ContainsFunc(vip.Families[:], checked) {
			problems = append(problems, Problem{e.object, ReasonNotChecked, fmt.Sprintf(
				"%s %s has no address of the family that is checked, %s: give it one, or let the check have families: both",
				e.object.Kind, e.name, st.Check.Families)})
			continue
		}
		name := fileName(e.name)
		if names[name] {
			continue
		}
		names[name] = true
		st.Targets = append(st.Targets, trench.Target{Name: name, IPs: e.ips.list(), Terminating: e.terminating})
	}
	if has != [len(vip.Families)]bool{} {
		for _, v := range st.VIPs {
			if !has[v.Family()] {
				problems = append(problems, Problem{reference(s), ReasonNoAddressOfFamily, fmt.Sprintf(
					"%s is not advertised: no Pod or endpoint has an address of its family, %s: "+
						"give them one in the network of the Trench, or remove the VIP", v, v.Family())})
			}
		}
	}
	if more := len(problems) - maxProblems; more > 0 {
		problems = append(problems[:maxProblems:maxProblems],
			Problem{reference(s), ReasonMore, fmt.Sprintf("%d more problems are not listed: repair these first", more)})
	}
	return problems, nil
}

// endpointsOf returns the endpoints of a Service, sorted by name: the Pods that its selector
// selects, or the endpoints of its EndpointSlices if it has no selector.
func (t *translator) endpointsOf(s *corev1.Service) []*endpoint {
	if len(s.Spec.Selector) == 0 {
		return t.sliceEndpoints(s)
	}
	key := firstKey(s.Spec.Selector)
	list := t.pods[label{s.Namespace, key, s.Spec.Selector[key]}]
	if len(s.Spec.Selector) == 1 {
		return list
	}
	selector := labels.SelectorFromSet(s.Spec.Selector)
	var selected []*endpoint
	for _, e := range list {
		if selector.Matches(labels.Set(e.pod.Labels)) {
			selected = append(selected, e)
		}
	}
	return selected
}

// withPorts returns the endpoints that have the ports of a Service, and the problems of the
// rejected endpoints. A named targetPort may have a different number in each Pod.
func withPorts(s *corev1.Service, list []*endpoint) ([]*endpoint, []Problem) {
	named := slices.DeleteFunc(slices.Clone(s.Spec.Ports), func(p corev1.ServicePort) bool {
		return p.TargetPort.Type != intstr.String
	})
	if len(named) == 0 || len(s.Spec.Selector) == 0 {
		return list, nil
	}
	var having []*endpoint
	var problems []Problem
	for _, e := range list {
		message := ""
		for _, p := range named {
			n := containerPort(e.pod, p)
			switch {
			case n == 0:
				message = fmt.Sprintf("targetPort %q is no port of Pod %s: name a port of its containers, "+
					"or write the number %d", p.TargetPort.StrVal, e.name, p.Port)
			case n != p.Port:
				message = fmt.Sprintf("port %d has the targetPort %q, which is %d in Pod %s, and vipgate does not "+
					"translate ports: let the application listen on port %d, or set the port to %d",
					p.Port, p.TargetPort.StrVal, n, e.name, p.Port, n)
			}
		}
		if message == "" {
			having = append(having, e)
		} else {
			problems = append(problems, Problem{e.object, ReasonPortTranslation, message})
		}
	}
	return having, problems
}

// containerPort returns the number of a named targetPort in a Pod, or 0 if no container has it. It
// searches init containers, too, because sidecars are among them.
func containerPort(pod *corev1.Pod, p corev1.ServicePort) int32 {
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for _, c := range containers {
			for _, q := range c.Ports {
				if q.Name == p.TargetPort.StrVal && protocol(q.Protocol) == protocol(p.Protocol) {
					return q.ContainerPort
				}
			}
		}
	}
	return 0
}
