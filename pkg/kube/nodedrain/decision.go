package nodedrain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// decision is what to do with the frontend. It is comparable.
type decision struct {
	known   bool // whether the label of the node is known
	drain   bool
	problem string // why a drain does not begin; "" if nothing prevents it
}

// asksForDrains reports whether the Trench has spec.nodeDrain.
func asksForDrains(input publication.Input) bool {
	if input.Objects.Trench == nil {
		return false
	}
	trench, err := v1alpha1.FromUnstructured(input.Objects.Trench)
	return err == nil && trench.Spec.NodeDrain
}

// decide decides about the frontend of a pod. drains reports whether it is drained already; such a
// drain ends with the label only. labelled is nil if the Trench does not ask for drains.
func decide(input publication.Input, labelled *nodes, pod string, drains bool) decision {
	if labelled == nil {
		// Without the Trench, nothing is known about its wishes.
		return decision{known: input.Objects.Trench != nil}
	}
	own := slices.IndexFunc(input.Siblings, func(other *corev1.Pod) bool { return other.Name == pod })
	listed, err := labelled.state()
	switch {
	case !listed && err != nil:
		return decision{problem: fmt.Sprintf("the Nodes cannot be read: %v", err)}
	case !listed || own < 0:
		return decision{}
	}
	if !labelled.leaves(input.Siblings[own].Spec.NodeName) {
		return decision{known: true}
	}
	last := publication.LastAdvertised(input, pod, func(other *corev1.Pod) bool {
		return labelled.leaves(other.Spec.NodeName)
	})
	if drains || len(last) == 0 {
		return decision{known: true, drain: true}
	}
	return decision{known: true, problem: fmt.Sprintf(
		"no pod on another node advertises %s: remove the label from another node, or run `frontend drain --all --force`",
		strings.Join(last[:min(len(last), 5)], ", "))}
}
