package publication

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/await"
)

// A report that is not renewed becomes old after a number of renewals of this process's report,
// fewer for a Pod that is not Ready. Without these renewals no report becomes old.
func TestReportsAge(t *testing.T) {
	ready := func(name string, status corev1.ConditionStatus) *corev1.Pod {
		p := annotated(name, "")
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
		return p
	}
	for _, c := range []struct {
		name   string
		status corev1.ConditionStatus
		own    []int // second of the last renewal of this process's report, at each evaluation
		other  []int
		old    []bool
	}{
		{
			"both renewed", "True",
			[]int{0, 10, 20, 30, 40},
			[]int{5, 15, 25, 35, 45},
			[]bool{false, false, false, false, false},
		},
		{"one dead", "True", []int{0, 10, 20, 30, 40}, []int{5, 5, 5, 5, 5}, []bool{false, false, false, true, true}},
		{"not Ready", "False", []int{0, 10, 20, 30, 40}, []int{5, 5, 5, 5, 5}, []bool{false, false, true, true, true}},
		{"returns", "True", []int{0, 10, 20, 30, 40}, []int{5, 5, 5, 5, 45}, []bool{false, false, false, true, false}},
		{"API server away", "True", []int{0, 0, 0, 0, 100}, []int{5, 5, 5, 5, 5}, []bool{false, false, false, false, false}},
		{"own changes", "False", []int{0, 3, 6, 9, 12}, []int{5, 5, 5, 5, 5}, []bool{false, false, false, false, false}},
		{
			"own clock set back", "True",
			[]int{3600, 3610, 20, 30, 40, 50},
			[]int{5, 5, 5, 5, 5, 5},
			[]bool{false, false, false, false, true, true},
		},
		{
			"clock behind", "True",
			[]int{0, 10, 20, 30, 40},
			[]int{-99, -89, -79, -69, -59},
			[]bool{false, false, false, false, false},
		},
	} {
		a := ages{interval: 10 * time.Second, seen: map[types.UID]renewal{}}
		pods := []*corev1.Pod{ready("b", c.status), ready("a", "True")}
		for i, want := range c.old {
			renewed := func(second int) Reported {
				return Reported{Report: Report{Renewed: at.Add(time.Duration(second) * time.Second)}}
			}
			reports := map[types.UID]Reported{"a": renewed(c.own[i]), "b": renewed(c.other[i])}
			a.mark(pods, "a", reports)
			if reports["b"].Old != want || reports["a"].Old {
				t.Errorf("%s, look %d: old %t, want %t", c.name, i+1, reports["b"].Old, want)
			}
		}
	}
}

// Until the API server has answered, no pod counts as one without a report.
func TestUnreadReports(t *testing.T) {
	pod := annotated("a", "")
	pod.Namespace = "trenches"
	object := &unstructured.Unstructured{Object: map[string]any{"report": map[string]any{"total": int64(2)}}}
	object.SetGroupVersionKind(v1alpha1.ReportKind)
	object.SetNamespace(pod.Namespace)
	object.SetName(pod.Name)
	object.SetLabels(map[string]string{v1alpha1.TrenchPodLabel: "t"})
	object.SetOwnerReferences([]metav1.OwnerReference{{Kind: "Pod", UID: pod.UID}})
	forbidden := apierrors.NewForbidden(v1alpha1.ReportResource.GroupResource(), "", errors.New("no"))
	for name, refused := range map[string]error{"listed": nil, "refused": forbidden} {
		client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
			map[schema.GroupVersionResource]string{v1alpha1.ReportResource: "TrenchReportList"}, object)
		// The reflector lists where the API server refuses to send a list as a watch.
		client.PrependWatchReactor("*", func(clienttesting.Action) (bool, watch.Interface, error) {
			return true, nil, apierrors.NewInvalid(schema.GroupKind{}, "sendInitialEvents", nil)
		})
		asked, answer := make(chan struct{}, 100), make(chan struct{})
		client.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
			asked <- struct{}{}
			<-answer
			return refused != nil, nil, refused
		})
		reported := make(chan struct{}, 1)
		publisher := &Publisher{
			options: Options{
				Namespace: pod.Namespace, Trench: "t", Pod: "b", Log: slog.New(slog.DiscardHandler),
				Input: latest.New(Input{Siblings: []*corev1.Pod{pod}}),
			},
			input: latest.New(Input{}), watch: client, reports: cluster.NewMirror(reported), reported: reported,
			timing: defaultTiming(),
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- publisher.gather(ctx) }()
		await.Receive(t, "list", asked)
		// The second change is read only after the first one was evaluated.
		for range 2 {
			publisher.options.Input.Set(Input{Siblings: []*corev1.Pod{pod}})
			latest.Wake(reported)
			await.True(t, "evaluation", func() bool { return len(reported) == 0 })
		}
		if input := publisher.input.Load(); input.Reports != nil {
			t.Errorf("%s: published before an answer: %+v", name, input.Reports)
		}
		close(answer)
		await.True(t, "answer", func() bool { return publisher.input.Load().Reports != nil })
		if reports := publisher.input.Load().Reports; (reports[pod.UID].Total == 2) != (refused == nil) {
			t.Errorf("%s: %+v", name, reports)
		}
		cancel()
		<-done
	}
}
