package translation_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
)

// The record of a Service has the sets of targets before the current one, keeps its text while
// nothing changes, and fits into a condition.
func TestRecordOfGenerations(t *testing.T) {
	service, now := &corev1.Service{}, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	set := func(names ...string) string { return `"targets":[["` + strings.Join(names, `","`) + `"],null]` }
	var many []string
	for i := range 500 {
		many = append(many, fmt.Sprintf("web-%032d", i))
	}
	for i, step := range []struct {
		after time.Duration
		names []string
		want  []string // sets in their order; nil for the record before
	}{
		{0, nil, []string{}},
		{0, []string{"a", "b"}, []string{set("a", "b")}},
		{time.Hour, []string{"b", "a"}, nil},
		{time.Hour, []string{"a"}, []string{set("a"), set("a", "b")}},
		{time.Second, []string{"c"}, []string{set("c"), set("a", "b")}}, // a short one
		{time.Minute, []string{"a", "c"}, []string{set("a", "c"), set("a", "b"), set("c")}},
		{13 * time.Hour, []string{"a", "c"}, []string{set("a", "c")}},
		{time.Hour, many, []string{set(many...), set("a", "c")}},
		// Two large sets do not fit, and none larger than a condition does.
		{time.Hour, many[1:], []string{set(many[1:]...), set("a", "c")}},
		{time.Hour, append(many, many...), []string{}},
	} {
		now = now.Add(step.after)
		before := ""
		for _, condition := range service.Status.Conditions {
			before = condition.Message
		}
		got := translation.Generations(service, step.names, now)
		if step.want == nil && got != before || step.want != nil && strings.Count(got, `"targets"`) != len(step.want) {
			t.Errorf("step %d: %s", i+1, got)
		}
		position := 0
		for _, set := range step.want {
			found := strings.Index(got[position:], set)
			if found < 0 {
				t.Fatalf("step %d: %s is not in its place in %s", i+1, set, got)
			}
			position += found
		}
		if len(got) > 32<<10 {
			t.Errorf("step %d: %d bytes", i+1, len(got))
		}
		service.Status.Conditions = []metav1.Condition{{Type: "vipgate.io/Generations", Message: got}}
	}
}
