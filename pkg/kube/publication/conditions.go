package publication

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
)

// find returns the condition of a type; nil: there is none.
func find(conditions []metav1.Condition, kind string) *metav1.Condition {
	i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Type == kind })
	if i < 0 {
		return nil
	}
	return &conditions[i]
}

// settle gives wanted conditions the transition time of the live ones, or now where the status
// changes, and reports whether anything else differs.
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

// acceptance returns the condition Accepted of a verdict. Its message names the problems, too.
func acceptance(kind string, v translation.Verdict) metav1.Condition {
	c := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, ObservedGeneration: v.Generation, Reason: v.Reason, Message: v.Message,
	}
	if v.Accepted {
		c.Status = metav1.ConditionTrue
	}
	return c
}

// targets returns the condition TargetsAccepted of a Service. While checks fail it is unknown: a pod
// without the sidecar accepts no packet to a VIP.
func targets(kind string, v translation.Verdict, ready metav1.Condition) metav1.Condition {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionTrue, ObservedGeneration: v.Generation}
	switch {
	case !v.Accepted:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, notAccepted, "the Service is not accepted"
	case len(v.Problems) > 0:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, v.Problems[0].Reason, problems(v)
	case ready.Reason == checkFailed:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, checkFailed, "a target fails its checks: see "+ready.Type
	default:
		c.Reason, c.Message = "Accepted", "no pod or endpoint of the Service is refused"
	}
	return c
}

// notAccepted is the reason of the other conditions of an object that is refused.
const notAccepted = "NotAccepted"

func problems(v translation.Verdict) string {
	lines := make([]string, len(v.Problems))
	for i, p := range v.Problems {
		lines[i] = describe(v, p)
	}
	return listed(lines)
}

// describe returns the message of a problem, with the object if that is another one.
func describe(v translation.Verdict, p translation.Problem) string {
	if p.Object.Kind == "" || (p.Object.Kind == v.Object.Kind && p.Object.Name == v.Object.Name) ||
		strings.Contains(p.Message, p.Object.Name) {
		return p.Message
	}
	return p.Object.Kind + " " + p.Object.Name + ": " + p.Message
}
