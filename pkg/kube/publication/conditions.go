package publication

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// find returns the condition of a type, or nil.
func find(conditions []metav1.Condition, kind string) *metav1.Condition {
	i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Type == kind })
	if i < 0 {
		return nil
	}
	return &conditions[i]
}

// settle sets the transition times of the wanted conditions: the live time, or now if the status
// changes. It reports whether a condition differs from the live one.
func settle(wanted, live []metav1.Condition, now metav1.Time) (differs bool) {
	for i := range wanted {
		w := &wanted[i]
		w.LastTransitionTime = now
		l := find(live, w.Type)
		if l != nil && l.Status == w.Status {
			w.LastTransitionTime = l.LastTransitionTime
		}
		differs = differs || l == nil || *l != *w
	}
	return differs
}

// acceptance returns the condition Accepted of a verdict. Its message includes the warnings.
func acceptance(kind string, v translation.Verdict) metav1.Condition {
	c := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, ObservedGeneration: v.Generation, Reason: v.Reason, Message: v.Message,
	}
	if v.Accepted {
		c.Status = metav1.ConditionTrue
	}
	if list := warnings(v); len(list) > 0 {
		c.Message += "; " + listed(lines(v, list))
	}
	return c
}

// lastAccepted returns the condition that records the last accepted form of a Service, or nil if
// the Service has no stream.
func lastAccepted(s *corev1.Service, v translation.ServiceVerdict) *metav1.Condition {
	const kind = v1alpha1.Group + "/" + v1alpha1.LastAccepted
	switch {
	case v.Accepted:
		if record := translation.Record(s); record != "" {
			return &metav1.Condition{
				Type: kind, Status: metav1.ConditionTrue, ObservedGeneration: v.Generation, Reason: "Recorded", Message: record,
			}
		}
	case v.Stream != "":
		if last := find(s.Status.Conditions, kind); last != nil {
			kept := *last
			return &kept
		}
	}
	return nil
}

// targets returns the condition TargetsAccepted of a Service. It is unknown while checks fail,
// because a pod without the sidecar, which accepts no packet to a VIP, also fails them.
func targets(kind string, v translation.Verdict, ready metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionTrue, ObservedGeneration: v.Generation}
	switch {
	case ready.Reason == notAccepted:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, notAccepted, ready.Message
	case len(refusals(v)) > 0:
		list := refusals(v)
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, list[0].Reason, listed(lines(v, list))
	case ready.Reason == checkFailed:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, checkFailed, "a target fails its checks: see "+ready.Type
	default:
		c.Reason, c.Message = "Accepted", "no pod or endpoint of the Service is refused"
	}
	return c
}

// notAccepted is the reason of the remaining conditions of a refused object.
const notAccepted = "NotAccepted"

func problems(v translation.Verdict) string { return listed(lines(v, v.Problems)) }

// warnings returns the problems of a verdict without effect on traffic; refusals returns the rest.
func warnings(v translation.Verdict) []translation.Problem {
	return slices.DeleteFunc(slices.Clone(v.Problems), func(p translation.Problem) bool { return !p.Warning() })
}

func refusals(v translation.Verdict) []translation.Problem {
	return slices.DeleteFunc(slices.Clone(v.Problems), translation.Problem.Warning)
}

// lines returns one description per problem.
func lines(v translation.Verdict, problems []translation.Problem) []string {
	all := make([]string, len(problems))
	for i, p := range problems {
		all[i] = describe(v, p)
	}
	return all
}

// describe returns the message of a problem, with the name of its object unless the message or the
// verdict already names it.
func describe(v translation.Verdict, p translation.Problem) string {
	if p.Object.Kind == "" || (p.Object.Kind == v.Object.Kind && p.Object.Name == v.Object.Name) ||
		strings.Contains(p.Message, p.Object.Name) {
		return p.Message
	}
	return p.Object.Kind + " " + p.Object.Name + ": " + p.Message
}
