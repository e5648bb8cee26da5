package translation_test

import (
	"testing"

	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/test/growth"
)

func TestGrowth(t *testing.T) {
	for _, dimension := range []struct {
		name                  string
		few, many, perService int
		shared                bool // Pods have a label in common, which sorts first
	}{
		{"pods", 100, 2500, 100, false}, {"services", 50, 500, 1, false},
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
				if translation.Translate(objects, options).Refused() {
					t.Fatal("refused")
				}
			}
		})
	}
	// Each claims the VIP of the next one.
	growth.Check(t, "conflicts", 50, 500, func(t *testing.T, n int) func() {
		objects := many(t, n, 1)
		for i, service := range objects.Services {
			service.Annotations["vipgate.io/vips"] += "," + objects.Services[(i+1)%n].Annotations["vipgate.io/vips"]
		}
		return func() { translation.Translate(objects, options) }
	})
}
