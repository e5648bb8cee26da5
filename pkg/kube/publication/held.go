package publication

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// heldTargets is the condition of a frontend whose load balancer holds removals of targets.
const heldTargets = "HeldTargets"

// heldRemovals returns the details of the conditions of a frontend that show held removals without
// the remedy, which differs for a Trench.
func heldRemovals(s *frontendv1.Status) string {
	var all []string
	for _, condition := range s.GetConditions() {
		if name := condition.GetName(); (name == v1alpha1.Held || name == heldTargets) && !condition.GetServing() {
			removals, _, _ := strings.Cut(condition.GetDetail(), separator)
			all = append(all, removals)
		}
	}
	return strings.Join(all, separator)
}

// separator separates held removals from each other, and from the remedy.
const separator = "; "

// held returns the condition Held of a Trench; nil if nothing is held and the live object has none.
func (all reports) held(trench *v1alpha1.Trench) *metav1.Condition {
	var removals, identifiers []string
	for _, report := range all {
		for held := range strings.SplitSeq(report.Held, separator) {
			if held != "" && !slices.Contains(removals, held) {
				removals = append(removals, held)
			}
		}
	}
	slices.Sort(removals) // by identifier
	for _, one := range removals {
		identifier, _, _ := strings.Cut(one, ":")
		identifiers = append(identifiers, identifier)
	}
	condition := &metav1.Condition{
		Type: v1alpha1.Held, Status: metav1.ConditionFalse, ObservedGeneration: trench.Generation, Reason: "NothingHeld",
		Message: "no removal waits for a confirmation",
	}
	if len(removals) > 0 {
		condition.Status, condition.Reason = metav1.ConditionTrue, reasonRemovalsHeld
		condition.Message = fmt.Sprintf("%s; correct the Trench to cancel, or confirm: kubectl annotate --overwrite "+
			"-n %s trench %s %s=%s", listed(removals), trench.Namespace, trench.Name, v1alpha1.ConfirmAnnotation,
			strings.Join(slices.Compact(identifiers), ","))
	} else if find(trench.Status.Conditions, v1alpha1.Held) == nil {
		return nil
	}
	return condition
}

const reasonRemovalsHeld = "RemovalsHeld"

// heldEvents returns the Event for removals that are held now and were not before.
func heldEvents(wanted, live *metav1.Condition) []event {
	if wanted == nil || wanted.Status != metav1.ConditionTrue ||
		live != nil && live.Status == wanted.Status && live.Message == wanted.Message {
		return nil
	}
	return []event{{true, reasonRemovalsHeld, "Hold", wanted.Message}}
}
