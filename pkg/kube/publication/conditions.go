package publication

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

var find = meta.FindStatusCondition // nil without the condition

// settle sets the transition times of the wanted conditions: the live time, or now if the status
// changes. It reports whether a condition differs from the live one.
func settle(wanted, live []metav1.Condition, now metav1.Time) (differs bool) {
	for i := range wanted {
		condition := &wanted[i]
		condition.LastTransitionTime = now
		l := find(live, condition.Type)
		if l != nil && l.Status == condition.Status {
			condition.LastTransitionTime = l.LastTransitionTime
		}
		differs = differs || l == nil || *l != *condition
	}
	return differs
}

// acceptance returns the condition Accepted of a verdict. Its message includes the warnings.
func acceptance(kind string, verdict translation.Verdict) metav1.Condition {
	condition := metav1.Condition{
		Type: kind, Status: metav1.ConditionFalse, ObservedGeneration: verdict.Generation, Reason: verdict.Reason,
		Message: verdict.Message,
	}
	if verdict.Accepted {
		condition.Status = metav1.ConditionTrue
	}
	warnings := slices.DeleteFunc(slices.Clone(verdict.Problems),
		func(problem translation.Problem) bool { return !problem.Warning() })
	if len(warnings) > 0 {
		condition.Message += "; " + listed(lines(verdict, warnings))
	}
	return condition
}

// lastAccepted returns the condition that records the last accepted form of a Service, also without
// a stream: it keeps its place in the quotas.
func lastAccepted(service *corev1.Service, verdict translation.ServiceVerdict) *metav1.Condition {
	if verdict.Accepted {
		return recordedAs(v1alpha1.LastAccepted, verdict, translation.Record(service))
	}
	if last := find(service.Status.Conditions, v1alpha1.Group+"/"+v1alpha1.LastAccepted); last != nil {
		kept := *last // the result must not refer to the shared object
		return &kept
	}
	return nil
}

// generations returns the condition that records the sets of targets of a Service with a stream, or
// nil if it has no targets yet.
func generations(service *corev1.Service, verdict translation.ServiceVerdict, now metav1.Time) *metav1.Condition {
	if verdict.Stream == "" {
		return nil
	}
	return recordedAs(v1alpha1.Generations, verdict, translation.Generations(service, verdict.Names, now.Time))
}

// recordedAs returns the condition that is a record, or nil for an empty one.
func recordedAs(kind string, verdict translation.ServiceVerdict, record string) *metav1.Condition {
	if record == "" {
		return nil
	}
	return &metav1.Condition{
		Type: v1alpha1.Group + "/" + kind, Status: metav1.ConditionTrue, ObservedGeneration: verdict.Generation,
		Reason: "Recorded", Message: record,
	}
}

// targets returns the condition TargetsAccepted of a Service. It is unknown while checks fail,
// because a pod without the sidecar, which accepts no packet to a VIP, also fails them.
func targets(kind string, verdict translation.Verdict, ready metav1.Condition) metav1.Condition {
	condition := metav1.Condition{Type: kind, Status: metav1.ConditionTrue, ObservedGeneration: verdict.Generation}
	switch {
	case ready.Reason == notAccepted:
		condition.Status, condition.Reason, condition.Message = metav1.ConditionUnknown, notAccepted, ready.Message
	case len(verdict.Refusals()) > 0:
		list := verdict.Refusals()
		condition.Status, condition.Reason = metav1.ConditionFalse, list[0].Reason
		condition.Message = listed(lines(verdict, list))
	case ready.Reason == checkFailed:
		condition.Status, condition.Reason, condition.Message = metav1.ConditionUnknown, checkFailed,
			"a target fails its checks: see "+ready.Type
	default:
		condition.Reason, condition.Message = "Accepted", "no pod or endpoint of the Service is refused"
	}
	return condition
}

// notAccepted is the reason of the remaining conditions of a refused object.
const notAccepted = "NotAccepted"

// lines returns one description per problem.
func lines(verdict translation.Verdict, problems []translation.Problem) []string {
	all := make([]string, len(problems))
	for i, problem := range problems {
		all[i] = describe(verdict, problem)
	}
	return all
}

// describe returns the message of a problem, with the name of its object unless the message or the
// verdict already names it.
func describe(verdict translation.Verdict, problem translation.Problem) string {
	if problem.Object.Kind == "" || (problem.Object.Kind == verdict.Object.Kind &&
		problem.Object.Name == verdict.Object.Name) ||
		strings.Contains(problem.Message, problem.Object.Name) {
		return problem.Message
	}
	return problem.Object.Kind + " " + problem.Object.Name + ": " + problem.Message
}
