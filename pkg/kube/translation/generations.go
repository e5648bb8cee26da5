package translation

import (
	"encoding/json"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Generations returns the record of the sets of targets of a Service as JSON, in which names are
// the current one, or "" if the Service has no targets. A new trench pod finds the targets of flows
// by the earlier sets, so they are in a condition of the Service, as the last accepted form is.
func Generations(service *corev1.Service, names []string, now time.Time) string {
	// The sets have no family: their first list has all names.
	generations, known := recordOf[plan.Generations](service, v1alpha1.Generations)
	if !known && len(names) == 0 {
		return ""
	}
	names = slices.Sorted(slices.Values(names))
	// A record that did not change keeps its times: each difference would be written.
	if !generations.Note([len(vip.Families)][]string{names}, now.UTC().Truncate(time.Second)) {
		return conditionMessage(service, v1alpha1.Generations)
	}
	for {
		text, err := json.Marshal(generations)
		if err == nil && len(text) <= maxRecord {
			return string(text)
		}
		if len(generations.Earlier) == 0 {
			return ""
		}
		generations.Earlier = generations.Earlier[:len(generations.Earlier)-1]
	}
}

// addEarlier adds the earlier sets of targets to a stream, without sets of which no target is left.
func (candidate *candidate) addEarlier() {
	stream := candidate.stream
	stream.Earlier = nil
	for _, generation := range candidate.generations.Earlier {
		names := generation.Targets[0]
		// Other users may write conditions: an invalid name must not break the trench file.
		invalid := func(name string) bool { return fileName(name) != name }
		lives := func(target trench.Target) bool { return slices.Contains(names, target.Name) }
		if len(stream.Earlier) < trench.MaxEarlier && !slices.ContainsFunc(names, invalid) &&
			slices.ContainsFunc(stream.Targets, lives) {
			stream.Earlier = append(stream.Earlier, trench.Generation{Targets: names})
		}
	}
}

// conditionMessage returns the message of a condition of a Service, or "".
func conditionMessage(service *corev1.Service, name string) string {
	for _, condition := range service.Status.Conditions {
		if condition.Type == v1alpha1.Group+"/"+name {
			return condition.Message
		}
	}
	return ""
}
