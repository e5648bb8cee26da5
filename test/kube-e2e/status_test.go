package kubee2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	admissionclient "k8s.io/client-go/kubernetes/typed/admissionregistration/v1"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"

	"github.com/vipgate/vipgate/pkg/kube/publication"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// TestStatusOfService follows the status of a Service: a start without warnings, edits that the
// API server rejects, edits that only kube rejects and that do not change the served state, a
// failing target, and a hung trench pod.
func TestStatusOfService(t *testing.T) {
	f := newFixture(t)
	f.cluster.Apply(t, trenchManifest())
	f.startTrenchPods()
	f.cluster.Apply(t, service)
	apps := f.Targets[:2]
	f.startTargets(apps)
	if warnings := f.warnings(t.Context()); len(warnings) > 0 {
		t.Errorf("a normal start warns: %q", warnings)
	}

	f.refusedServiceKeepsStream()
	f.failingTarget(apps[1])
	f.hungPod()
	f.wantUpdates(1) // no edit reached the gateway
}

// startTargets runs the Pods of the Service until all trench pods advertise its VIPs.
func (f *fixture) startTargets(apps []*lab.App) {
	f.t.Helper()
	for _, app := range apps {
		f.kubelet.create(app)
		f.kubelet.run(app)
		f.kubelet.ready(app)
		f.wantReady(app)
	}
	f.wantAnnounced()
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "2 of 2 VIPs by 2 of 2 pods")
	f.wantCondition(v1alpha1.TargetsReady, metav1.ConditionTrue, "no target fails")
	f.wantCondition(v1alpha1.TargetsAccepted, metav1.ConditionTrue, "")
}

// wantCondition waits until a condition of the Service has a status and a message that contains
// text.
func (f *fixture) wantCondition(kind string, status metav1.ConditionStatus, text string) {
	f.t.Helper()
	f.wait(func(ctx context.Context) error {
		s, err := f.core.Services(namespace).Get(ctx, serviceName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.Group+"/"+kind)
		if c == nil || c.Status != status || !strings.Contains(c.Message, text) {
			return fmt.Errorf("condition %s is %+v, want %s with %q", kind, c, status, text)
		}
		return nil
	})
}

// warnings returns the Events that warn about the Service.
func (f *fixture) warnings(ctx context.Context) (all []string) {
	f.t.Helper()
	list, err := f.core.Events(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "involvedObject.kind=Service,type=" + corev1.EventTypeWarning,
	})
	f.must(err)
	for _, e := range list.Items {
		all = append(all, e.Reason+": "+e.Message)
	}
	return all
}

func (f *fixture) wantWarning(reason string) {
	f.t.Helper()
	f.wait(func(ctx context.Context) error {
		warnings := f.warnings(ctx)
		for _, w := range warnings {
			if strings.HasPrefix(w, reason+": ") {
				return nil
			}
		}
		return fmt.Errorf("no Event %s among %q", reason, warnings)
	})
}

// refusedServiceKeepsStream makes kube refuse the Service, as in a cluster without policies: the
// stream is unchanged, also in a new pod.
func (f *fixture) refusedServiceKeepsStream() {
	f.t.Helper()
	before, err := os.ReadFile(f.Pods[0].TrenchFile())
	f.must(err)
	f.wantCondition(v1alpha1.LastAccepted, metav1.ConditionTrue, `"vipgate.io/vips":"20.0.0.1,2000::1"`)
	admission, err := admissionclient.NewForConfig(f.cluster.Admin())
	f.must(err)
	const binding = "services.vipgate.io"
	f.must(admission.ValidatingAdmissionPolicyBindings().Delete(f.t.Context(), binding, metav1.DeleteOptions{}))
	f.wait(func(ctx context.Context) error {
		_, err := f.edit(ctx, false, annotated("check", "wrong"))
		return err
	})
	f.wantCondition(v1alpha1.Accepted, metav1.ConditionFalse, "serving generation")
	f.wantWarning("InvalidAnnotation")
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "2 of 2 VIPs by 2 of 2 pods")

	// A misspelt name; a check of a newer version, together with an unknown annotation.
	for patch, reason := range map[string]string{
		`{"metadata":{"annotations":{"vipgate.io/vips":null,"vipgate.io/vip":"20.0.0.1,2000::1"}}}`: "NoVIPs",
		`{"metadata":{"annotations":{"vipgate.io/vips":"20.0.0.1,2000::1","vipgate.io/vip":null,` +
			`"vipgate.io/weight":"3","vipgate.io/check":"{\"dns\":{\"name\":\"a.example\"}}"}}}`: "InvalidAnnotation",
	} {
		_, err := f.edit(f.t.Context(), false, patch)
		f.must(err)
		f.wantReason(reason)
		after, err := os.ReadFile(f.Pods[1].TrenchFile())
		f.must(err)
		if string(after) != string(before) {
			f.t.Errorf("%s changed the trench file to\n%s", patch, after)
		}
	}

	f.must(f.kubes[0].Signal(syscall.SIGTERM))
	ctx := harness.Context(f.t, waitTimeout)
	_, err = f.kubes[0].Wait(ctx)
	f.must(err)
	again := filepath.Join(f.Pods[0].Dir, "again", "trench.yaml")
	f.must(os.MkdirAll(filepath.Dir(again), 0o755))
	f.kubes[0] = f.startKube(1, again)
	f.wait(func(context.Context) error {
		after, err := os.ReadFile(again)
		if err == nil && string(after) != string(before) {
			err = fmt.Errorf("a new pod has the trench file\n%s\nwant\n%s", after, before)
		}
		return err
	})

	_, err = f.edit(ctx, false, `{"metadata":{"annotations":{"vipgate.io/vips":"20.0.0.1,2000::1","vipgate.io/vip":null,`+
		`"vipgate.io/weight":null,"vipgate.io/check":"{\"tcp\":{\"port\":5000}}"}}}`)
	f.must(err)
	_, err = f.edit(ctx, false, annotated("minready", "2"))
	f.must(err)
	f.wantCondition(v1alpha1.Accepted, metav1.ConditionTrue, "annotation vipgate.io/minready is unknown")
	f.wantWarning("UnknownAnnotation")
}

// wantReason waits until the Service is refused for a reason and its stream serves.
func (f *fixture) wantReason(reason string) {
	f.t.Helper()
	f.wait(func(ctx context.Context) error {
		s, err := f.core.Services(namespace).Get(ctx, serviceName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.Group+"/"+v1alpha1.Accepted)
		if c == nil || c.Reason != reason || !strings.Contains(c.Message, "serving generation") {
			return fmt.Errorf("condition %+v, want %s", c, reason)
		}
		return nil
	})
}

// failingTarget stops an application whose Pod is Ready: the condition has the error of lb while
// the remaining target serves.
func (f *fixture) failingTarget(app *lab.App) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(app.Stop(ctx))
	f.wantCondition(v1alpha1.TargetsReady, metav1.ConditionFalse, app.Name+" (")
	f.wantCondition(v1alpha1.TargetsReady, metav1.ConditionFalse, "does not listen")
	f.wantCondition(v1alpha1.TargetsAccepted, metav1.ConditionUnknown, "TargetsReady")
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "2 of 2 VIPs by 2 of 2 pods")
	f.wantWarning("CheckFailed")
	f.must(app.Start())
	f.wantCondition(v1alpha1.TargetsReady, metav1.ConditionTrue, "no target fails")
}

// hungPod stops the kube of a trench pod that is not the leader: its report no longer counts.
func (f *fixture) hungPod() {
	f.t.Helper()
	leases, err := coordinationclient.NewForConfig(f.cluster.Admin())
	f.must(err)
	lease, err := leases.Leases(namespace).Get(f.t.Context(), publication.LeaseName("trench-a"), metav1.GetOptions{})
	f.must(err)
	pod := 1
	if *lease.Spec.HolderIdentity == podName(1) {
		pod = 2
	}
	f.podReady(pod, corev1.ConditionFalse)
	f.must(f.kubes[pod-1].Signal(syscall.SIGSTOP))
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "by 1 of 2 pods: its report is no longer renewed")
	f.must(f.kubes[pod-1].Signal(syscall.SIGCONT))
	f.podReady(pod, corev1.ConditionTrue)
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "2 of 2 VIPs by 2 of 2 pods")
}

// podReady sets the Ready condition of a trench pod, as the kubelet does.
func (f *fixture) podReady(pod int, status corev1.ConditionStatus) {
	f.t.Helper()
	body, err := json.Marshal(corev1.Pod{Status: corev1.PodStatus{
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}},
	}})
	f.must(err)
	_, err = f.core.Pods(namespace).Patch(f.t.Context(), podName(pod), types.StrategicMergePatchType, body,
		metav1.PatchOptions{}, "status")
	f.must(err)
}
