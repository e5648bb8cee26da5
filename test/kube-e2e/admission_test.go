package kubee2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/harness"
)

// TestAdmissionPolicies checks that the API server rejects invalid edits of Services, and reports
// about other pods.
func TestAdmissionPolicies(t *testing.T) {
	f := newCluster(t)
	f.cluster.Apply(t, service)
	f.createTrenchPod(1)
	f.createTrenchPod(2)
	f.wrongEditsAreRefused()
	f.forgedAddressesAreRefused()
	f.foreignReports()
	f.removalsAreWarned()
}

// said collects the warnings of the API server.
type said struct {
	mu   sync.Mutex
	text string
}

// HandleWarningHeader implements rest.WarningHandler.
func (s *said) HandleWarningHeader(_ int, _, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text += text + "\n"
}

// edit changes the Service as kubectl does; a dry run persists nothing. It returns the warnings.
func (f *fixture) edit(ctx context.Context, dryRun bool, patch string) (warnings string, err error) {
	f.t.Helper()
	config, heard := f.cluster.Admin(), &said{}
	config.WarningHandler = heard
	client, err := rest.HTTPClientFor(config)
	f.must(err)
	defer client.CloseIdleConnections()
	core, err := typedcorev1.NewForConfigAndClient(config, client)
	f.must(err)
	var o metav1.PatchOptions
	if dryRun {
		o.DryRun = []string{metav1.DryRunAll}
	}
	_, err = core.Services(namespace).Patch(ctx, serviceName, types.MergePatchType, []byte(patch), o)
	return heard.text, err
}

// annotated returns the patch that sets an annotation.
func annotated(name, value string) string {
	text, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"annotations": map[string]string{v1alpha1.Group + "/" + name: value}},
	})
	if err != nil {
		panic(err)
	}
	return string(text)
}

// wrongEditsAreRefused checks the admission policies for Services.
func (f *fixture) wrongEditsAreRefused() {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	port := func(target string) string {
		return `{"spec":{"ports":[{"name":"http","port":8080,"targetPort":` + target + `}]}}`
	}
	f.wait(func(ctx context.Context) error { // the API server watches its policies
		_, err := f.edit(ctx, true, annotated("min-ready", "none"))
		warning, _ := f.edit(ctx, true, annotated("minready", "2"))
		if err == nil || warning == "" {
			return fmt.Errorf("not both policies are in force: %v, %q", err, warning)
		}
		return nil
	})
	for _, c := range []struct{ patch, want string }{
		{annotated("vips", " "), "vipgate.io/vips is missing"},
		{annotated("vips", "20.0.0.1,20.0.0.256"), "annotation vipgate.io/vips"},
		{annotated("vips", "20.0.0.1/24"), "annotation vipgate.io/vips"},
		{annotated("min-ready", "0"), "annotation vipgate.io/min-ready"},
		{annotated("drain-time", "30"), "annotation vipgate.io/drain-time"},
		{annotated("check", `"tcp"`), "annotation vipgate.io/check"},
		{annotated("maglev", "1009"), "annotation vipgate.io/maglev"},
		{annotated("policy", "50"), "annotation vipgate.io/policy"},
		{port("80"), "targetPort"},
	} {
		_, err := f.edit(ctx, true, c.patch)
		harness.WantError(f.t, err, c.want)
	}
	for _, c := range []struct{ patch, warning string }{
		{annotated("vips", "20.0.0.1/32, 2000::1"), ""},
		{annotated("min-ready", "2"), ""},
		{annotated("drain-time", "1m30s"), ""},
		{annotated("check", ` {"http": {"port": 8080, "path": "/"}}`+"\n"), ""},
		{annotated("policy", `{"ready": {"med": 50}}`), ""},
		{port(`"http"`), ""},
		{annotated("minready", "2"), "unknown annotation vipgate.io/minready"},
		{`{"spec":{"sessionAffinity":"ClientIP"}}`, "spec.sessionAffinity has no effect"},
	} {
		warning, err := f.edit(ctx, true, c.patch)
		if err != nil || !strings.Contains(warning, c.warning) || c.warning == "" && warning != "" {
			f.t.Errorf("%s: %v, warning %q, want %q", c.patch, err, warning, c.warning)
		}
	}
}

// forgedAddressesAreRefused checks that only writers of a Pod's status set a target's addresses.
func (f *fixture) forgedAddressesAreRefused() {
	f.t.Helper()
	const status = `{"metadata":{"annotations":{"k8s.v1.cni.cncf.io/network-status":"[]"}}}`
	const labels = `{"metadata":{"labels":{"vipgate.io/trench":"trench-a","more":"x"}}}`
	for name, labels := range map[string]string{"labeled": "{vipgate.io/trench: trench-a}", "plain": "{}"} {
		f.cluster.Apply(f.t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: trench-a, labels: %s}
spec: {containers: [{name: app, image: app}]}
`, name, labels))
	}
	patch := func(ctx context.Context, name, body string, subresources ...string) error {
		_, err := f.core.Pods(namespace).Patch(ctx, name, types.MergePatchType, []byte(body), metav1.PatchOptions{},
			subresources...)
		return err
	}
	const refusal = "is written by Multus only"
	f.wait(func(ctx context.Context) error { // the API server watches its policies
		_, err := f.core.Pods(namespace).Patch(ctx, "labeled", types.MergePatchType, []byte(status),
			metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || !strings.Contains(err.Error(), refusal) {
			return fmt.Errorf("the policy of Pods is not in force: %v", err)
		}
		return nil
	})
	ctx := harness.Context(f.t, waitTimeout)
	f.must(patch(ctx, "labeled", status, "status")) // as Multus
	f.must(patch(ctx, "labeled", labels))
	f.must(patch(ctx, "plain", status))
	harness.WantError(f.t, patch(ctx, "plain", labels), refusal)
}

// removalsAreWarned checks that kubectl names the removals that will be held.
func (f *fixture) removalsAreWarned() {
	f.t.Helper()
	trench := func(fields, vips, gateways string) string {
		return `{"apiVersion": "vipgate.io/v1alpha1", "kind": "Trench", "metadata": {"name": "trench-a",
			"namespace": "trench-a"}, "spec": {` + fields + `"attractor": {"name": "a", "vips": [` + vips +
			`], "gateways": [` + gateways + `]}}}`
	}
	const (
		five     = `"20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "20.0.0.4/32", "2000::1/128"`
		two      = `"20.0.0.1/32", "2000::1/128"`
		gateway4 = `{"name": "g4", "address": "169.254.100.150"}`
		gateway6 = `{"name": "g6", "address": "fd00:100::150"}`
		both     = gateway4 + ", " + gateway6
		family   = "the removal of the last gateway of a family is held"
	)
	f.kubectl(trench("", five, both))
	for _, c := range []struct{ manifest, warning string }{
		{trench("", two, both), "the removal of 3 of 5 VIPs is held until it is confirmed"},
		{trench("", `"20.0.0.1/32", "20.0.1.2/32", "20.0.1.3/32", "20.0.1.4/32"`, both), "the removal of 4 of 5 VIPs"},
		{trench("", five, gateway4), family},
		{trench("", five, ""), family},
		{trench("", `"20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "20.0.0.4/32"`, gateway4), ""},
		{trench("", `"20.0.0.1/32", "20.0.0.2/32", "2000::1/128"`, both), ""},
		{trench(`"maxRemoval": 60, `, two, both), ""},
		{trench(`"maxRemoval": 100, `, two, ""), ""},
		{trench("", five+`, "20.0.9.1/32"`, both), ""},
	} {
		f.wait(func(context.Context) error { // the API server watches its policies
			said := f.kubectl(c.manifest, "--dry-run=server")
			if !strings.Contains(said, c.warning) || c.warning == "" && strings.Contains(said, "Warning") {
				return fmt.Errorf("%s: %q, want %q", c.manifest, said, c.warning)
			}
			return nil
		})
	}
	const (
		session    = `{"name": "g4", "address": "169.254.100.150", "families": "both"}`
		unnumbered = `{"name": "u", "interface": "ext-vlan"}`
	)
	for _, c := range []struct {
		before, after string
		held          bool
	}{
		{gateway4 + ", " + unnumbered, gateway4, true},
		{gateway4 + ", " + unnumbered, unnumbered, false},
		{session + ", " + gateway6, session, false},
		{session, gateway4, true},
		{unnumbered, "", true},
	} {
		f.kubectl(trench("", five, c.before))
		said := f.kubectl(trench("", five, c.after), "--dry-run=server")
		if strings.Contains(said, family) != c.held {
			f.t.Errorf("%s to %s: %q", c.before, c.after, said)
		}
	}
}

// kubectl applies a manifest with kubectl, and returns its output.
func (f *fixture) kubectl(manifest string, args ...string) string {
	f.t.Helper()
	config := f.cluster.Kubeconfig(f.t, f.cluster.Admin())
	command := exec.CommandContext(f.t.Context(), "../../bin/tools/kubectl",
		append([]string{"--kubeconfig=" + config, "apply", "-f", "-"}, args...)...)
	command.Stdin = strings.NewReader(manifest)
	out, err := command.CombinedOutput()
	if err != nil {
		f.t.Fatalf("kubectl apply: %v: %s", err, out)
	}
	return string(out)
}

// foreignReports checks that a trench pod cannot write the report of another pod.
func (f *fixture) foreignReports() {
	f.t.Helper()
	client, err := dynamic.NewForConfig(f.cluster.PodServiceAccount(f.t, namespace, "vipgate", podName(1)))
	f.must(err)
	reports := client.Resource(v1alpha1.ReportResource).Namespace(namespace)
	patch := func(ctx context.Context, name, body string) error {
		_, err := reports.Patch(ctx, name, types.MergePatchType, []byte(body), metav1.PatchOptions{})
		return err
	}
	ctx := harness.Context(f.t, waitTimeout)
	for n := 1; n <= trenchPods; n++ {
		f.wait(func(ctx context.Context) error { return f.report(ctx, n, n) }) // the API server watches Pods
	}
	f.wait(func(ctx context.Context) error {
		if err := f.report(ctx, 1, 2); err == nil {
			return fmt.Errorf("%s writes the report of %s", podName(1), podName(2))
		}
		return nil
	})
	f.must(patch(ctx, podName(1), `{"report":{"advertised":2}}`))
	const owner = `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"trench-a-2","uid":"other"}]}}`
	for name, body := range map[string]string{podName(2): `{"report":{"advertised":0}}`, podName(1): owner} {
		if err := patch(ctx, name, body); !apierrors.IsForbidden(err) {
			f.t.Errorf("the report of %s is written by %s: %v", name, podName(1), err)
		}
	}
	if err := f.report(ctx, 1, 2); !apierrors.IsForbidden(err) {
		f.t.Errorf("the report of %s is applied by %s: %v", podName(2), podName(1), err)
	}
	// The Role does not include the status of a Pod.
	core, err := typedcorev1.NewForConfig(f.cluster.PodServiceAccount(f.t, namespace, "vipgate", podName(1)))
	f.must(err)
	_, err = core.Pods(namespace).Patch(ctx, podName(1), types.MergePatchType, []byte(`{"status":{}}`),
		metav1.PatchOptions{}, "status")
	if !apierrors.IsForbidden(err) {
		f.t.Errorf("the status of a Pod may be patched: %v", err)
	}
}

// report applies the report of pod with the token of writer.
func (f *fixture) report(ctx context.Context, writer, pod int) error {
	f.t.Helper()
	client, err := dynamic.NewForConfig(f.cluster.PodServiceAccount(f.t, namespace, "vipgate", podName(writer)))
	f.must(err)
	p, err := f.core.Pods(namespace).Get(ctx, podName(pod), metav1.GetOptions{})
	f.must(err)
	body := fmt.Sprintf(`
apiVersion: vipgate.io/v1alpha1
kind: TrenchReport
metadata:
  name: %[1]s
  labels: {vipgate.io/trench-pod: trench-a}
  ownerReferences: [{apiVersion: v1, kind: Pod, name: %[1]s, uid: %[2]s}]
report: {renewed: "2026-01-01T00:00:00.5Z", time: "2026-01-01T00:00:00Z", advertised: 0, total: 2}
`, podName(pod), p.UID)
	force := true
	_, err = client.Resource(v1alpha1.ReportResource).Namespace(namespace).Patch(ctx, podName(pod),
		types.ApplyPatchType, []byte(body), metav1.PatchOptions{FieldManager: "vipgate", Force: &force})
	return err
}
