package kubee2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
)

// TestHeldRemovals removes most VIPs from the Trench: both pods keep them until the annotation
// confirms it, the Trench names the removals, and there is one Event.
func TestHeldRemovals(t *testing.T) {
	f := newFixture(t)
	f.cluster.Apply(t, strings.Replace(trenchManifest(), "vips: [", "vips: [20.0.0.2/32, 20.0.0.3/32, ", 1))
	f.startTrenchPods()
	f.cluster.Apply(t, service)
	for _, app := range f.Targets[:replicas] {
		f.kubelet.create(app)
		f.kubelet.run(app)
		f.kubelet.ready(app)
	}
	f.wantAnnounced()
	f.wantTargetsHeld()
	const few, all = `["20.0.0.2/32"]`, `["20.0.0.1/32", "2000::1/128", "20.0.0.2/32", "20.0.0.3/32"]`
	vips := func(list string) {
		f.t.Helper()
		f.patchTrench(`[{"op": "replace", "path": "/spec/attractor/vips", "value": ` + list + `}]`)
	}
	vips(few)
	held := f.wantHeld(metav1.ConditionTrue)
	if !strings.Contains(held, "the removal of 3 of 4 VIPs (20.0.0.1/32, ") {
		t.Errorf("condition Held: %s", held)
	}
	f.wantUpdates(1)
	f.wait(func(ctx context.Context) error { return f.heldEvents(ctx, 2) })
	vips(all) // cancels
	f.wantHeld(metav1.ConditionFalse)
	vips(few)
	held = f.wantHeld(metav1.ConditionTrue)
	f.wantUpdates(1)
	_, confirm, _ := strings.Cut(held, v1alpha1.ConfirmAnnotation+"=")
	f.patchTrench(`[{"op": "add", "path": "/metadata/annotations", "value": {"` + v1alpha1.ConfirmAnnotation + `": "` +
		confirm + `"}}]`)
	f.wantRoutes()
	f.wantUpdates(3) // announced, de-preferred, withdrawn
	f.wantHeld(metav1.ConditionFalse)
	f.must(f.heldEvents(t.Context(), 3)) // one for each time
}

// wantTargetsHeld removes the label that two Services select from every Pod: with the last Pod both
// streams lose all targets. The load balancers hold them, and the Trench names the streams.
func (f *fixture) wantTargetsHeld() {
	f.t.Helper()
	second := strings.NewReplacer("name: web", "name: second", "20.0.0.1,2000::1", "20.0.0.2").Replace(service)
	f.cluster.Apply(f.t, second)
	f.wantRoutes(route4, route6, "20.0.0.2/32")
	label := func(value string) {
		f.t.Helper()
		for _, app := range f.Targets[:replicas] {
			_, err := f.core.Pods(namespace).Patch(f.t.Context(), app.Name, types.MergePatchType,
				[]byte(`{"metadata": {"labels": {"app": "`+value+`"}}}`), metav1.PatchOptions{})
			f.must(err)
		}
	}
	label("wbe")
	if held := f.wantHeld(metav1.ConditionTrue); !strings.Contains(held, "the removal of all targets of streams (") ||
		!strings.Contains(held, "second") || !strings.Contains(held, v1alpha1.ConfirmAnnotation+"=t") {
		f.t.Errorf("condition Held: %s", held)
	}
	f.wait(func(ctx context.Context) error { return f.heldEvents(ctx, 1) })
	f.wantRoutes(route4, route6, "20.0.0.2/32")
	label("web") // cancels
	f.wantHeld(metav1.ConditionFalse)
	f.must(f.core.Services(namespace).Delete(f.t.Context(), "second", metav1.DeleteOptions{}))
	f.wantRoutes(route4, route6)
}

// wantHeld waits until the condition Held of the Trench has a status, and returns its message.
func (f *fixture) wantHeld(status metav1.ConditionStatus) (message string) {
	f.t.Helper()
	client, err := dynamic.NewForConfig(f.cluster.Admin())
	f.must(err)
	f.wait(func(ctx context.Context) error {
		object, err := client.Resource(v1alpha1.Resource).Namespace(namespace).Get(ctx, "trench-a", metav1.GetOptions{})
		if err != nil {
			return err
		}
		trench, err := v1alpha1.FromUnstructured(object)
		f.must(err)
		condition := meta.FindStatusCondition(trench.Status.Conditions, v1alpha1.Held)
		if condition == nil || condition.Status != status || condition.ObservedGeneration != trench.Generation {
			return fmt.Errorf("condition Held is %v, want %s", condition, status)
		}
		message = condition.Message
		return nil
	})
	return message
}

// heldEvents returns an error unless there are n Events about held removals, with repetitions.
func (f *fixture) heldEvents(ctx context.Context, n int) error {
	f.t.Helper()
	list, err := f.core.Events(namespace).List(ctx, metav1.ListOptions{})
	f.must(err)
	found := 0
	for _, event := range list.Items {
		if event.Reason != "RemovalsHeld" {
			continue
		}
		if found++; event.Series != nil {
			found += int(event.Series.Count) - 1
		}
	}
	if found != n {
		return fmt.Errorf("%d Events about held removals, want %d", found, n)
	}
	return nil
}
