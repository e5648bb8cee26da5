package translation_test

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/growth"
)

func TestGrowth(t *testing.T) {
	for _, dimension := range []struct {
		name                  string
		few, many, perService int
		shared                bool // Pods have a label in common, which sorts first
	}{
		{"pods", 100, 2500, 100, false},
		{"services", 50, 500, 1, false},
		{"services of one application", 1000, 2500, 5, true},
	} {
		growth.Check(t, dimension.name, dimension.few, dimension.many, func(t *testing.T, n int) func() {
			objects := many(t, n, dimension.perService)
			for _, pod := range objects.Pods {
				pod.Labels["a"] = "shop"
			}
			for _, service := range objects.Services {
				if dimension.shared {
					service.Spec.Selector["a"] = "shop"
				}
			}
			return func() {
				if len(translation.Translate(objects, options).Refused()) > 0 {
					t.Fatal("refused")
				}
			}
		})
	}
	// Each claims the VIP of the next one: new Services, and edits of those that have their own.
	for name, edits := range map[string]bool{"conflicts": false, "conflicts of edits": true} {
		growth.Check(t, name, 50, 500, func(t *testing.T, n int) func() {
			objects := many(t, n, 1)
			for i, service := range objects.Services {
				record := translation.Record(service)
				if condition := (metav1.Condition{Type: v1alpha1.Group + "/" + v1alpha1.LastAccepted, Message: record}); edits {
					service.Status.Conditions = []metav1.Condition{condition}
				}
				service.Annotations[v1alpha1.VIPsAnnotation] += "," +
					fmt.Sprintf("20.0.%d.%d", (i+1)%n/250, (i+1)%n%250)
			}
			return func() { translation.Translate(objects, options) }
		})
	}
}
