package kubee2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/lab/admin"
	"github.com/vipgate/vipgate/test/load"
)

// TestNodeDrain labels the nodes of the trench pods under traffic. Without spec.nodeDrain nothing
// happens; with it, the pod of the first node drains, the last one does not, and each one is
// advertised again without the label.
func TestNodeDrain(t *testing.T) {
	f := newFixture(t)
	f.cluster.Apply(t, trenchManifest())
	f.startTrenchPods()
	f.cluster.Apply(t, service)
	for _, app := range f.Targets[:replicas] {
		f.kubelet.create(app)
		f.kubelet.run(app)
		f.kubelet.ready(app)
	}
	for n := range f.Pods {
		f.cluster.Apply(t, fmt.Sprintf("{apiVersion: v1, kind: Node, metadata: {name: node-%d}}", n+1))
	}
	f.wantAnnounced()
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "2 of 2 VIPs by 2 of 2 pods")
	g, err := f.Load(t.Context(), rate, 0, load.Config{})
	f.must(err)
	t.Cleanup(func() { g.Stop(context.Background()) })
	f.wantAnswers(g)

	f.labelNode(1, `"true"`)
	f.patchNode(1, `{"spec": {"unschedulable": true}}`)
	f.patchTrench(`[{"op": "add", "path": "/spec/nodeDrain", "value": true}]`)
	f.wantKubeStatus(1, "cannot be read") // the ClusterRole is missing
	f.wantUpdates(1)                      // neither the label nor the cordon had an effect
	f.bindNodes()

	f.wantDrained(1, true)
	f.wantAnswers(g)
	f.labelNode(2, `"true"`)
	f.wantKubeStatus(2, "no pod on another node advertises 20.0.0.1")
	f.wantDrained(2, false)

	f.labelNode(1, "null")
	f.wantDrained(1, false)
	f.wantDrained(2, true)
	f.patchTrench(`[{"op": "remove", "path": "/spec/nodeDrain"}]`)
	f.wantDrained(2, false)
	f.wantAnnounced()

	f.drainedByOperator(g)
	f.wantAnswers(g)
	f.lost(g.Stop(t.Context()))
}

// drainedByOperator drains a pod by an operator's command. The other pod is the last advertiser and
// refuses it.
func (f *fixture) drainedByOperator(g *load.Generator) {
	f.t.Helper()
	// Within 10 s kube notifies the frontend that the other pod advertises the VIPs.
	f.wantOperated(1, "drained: ", "drain", "--all")
	f.wantDrained(1, true)
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue,
		"20.0.0.1: advertised by 1 of 2 pods: drained by an operator (trench-a-1)")
	// The condition can precede the call of the other pod's kube by an instant.
	f.waitEvery(processInterval, func(ctx context.Context) error {
		out, err := f.operate(ctx, 2, "drain", "--all")
		if err == nil {
			_, err = f.operate(ctx, 2, "undrain")
			return fmt.Errorf("drained: %s, %w", out, err)
		}
		return f.contains(out, err, "no other pod advertises 20.0.0.1/32, 2000::1/128; --force drains")
	})
	f.wantDrained(2, false)
	f.wantAnswers(g)
	f.wantOperated(1, "no VIP is drained", "undrain")
	f.wantDrained(1, false)
	f.wantCondition(v1alpha1.Advertised, metav1.ConditionTrue, "2 of 2 VIPs by 2 of 2 pods")
}

// wantOperated runs a command of a pod's frontend until its output contains a text.
func (f *fixture) wantOperated(pod int, text string, args ...string) {
	f.t.Helper()
	f.waitEvery(processInterval, func(ctx context.Context) error {
		out, err := f.operate(ctx, pod, args...)
		return f.contains(out, err, text)
	})
}

// operate runs a command of a pod's frontend.
func (f *fixture) operate(ctx context.Context, pod int, args ...string) (string, error) {
	p := f.Pods[pod-1]
	return p.Run(ctx, "frontend", append(args, "--admin-socket=unix://"+p.FrontendAdmin())...)
}

// contains returns an error if the output of a command lacks a text.
func (f *fixture) contains(out string, err error, text string) error {
	if strings.Contains(out, text) {
		return nil
	}
	return fmt.Errorf("no %q in the output: %w: %s", text, err, out)
}

// labelNode sets the drain label of a node to a JSON value.
func (f *fixture) labelNode(node int, value string) {
	f.t.Helper()
	f.patchNode(node, `{"metadata": {"labels": {"`+v1alpha1.DrainLabel+`": `+value+`}}}`)
}

func (f *fixture) patchNode(node int, patch string) {
	f.t.Helper()
	_, err := f.core.Nodes().Patch(f.t.Context(), fmt.Sprintf("node-%d", node), types.MergePatchType, []byte(patch),
		metav1.PatchOptions{})
	f.must(err)
}

// bindNodes applies the component node-drain.
func (f *fixture) bindNodes() {
	f.t.Helper()
	f.cluster.Apply(f.t, strings.Replace(f.manifest("deployments/components/node-drain/clusterrole.yaml"),
		"  - kind: ServiceAccount\n", "  - kind: ServiceAccount\n    namespace: "+namespace+"\n", 1))
}

// wantKubeStatus waits until the status of a kube contains a text.
func (f *fixture) wantKubeStatus(pod int, text string) {
	f.t.Helper()
	f.waitEvery(processInterval, func(ctx context.Context) error {
		p := f.Pods[pod-1]
		out, err := p.Run(ctx, "kube", "status", "--admin-socket=unix://"+filepath.Join(p.Dir, "kube.sock"))
		return f.contains(out, err, text)
	})
}

// wantDrained waits until a pod advertises no VIP because of a drain, or until it announces all.
func (f *fixture) wantDrained(pod int, drained bool) {
	f.t.Helper()
	want := readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	if drained {
		want = readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	}
	f.wait(func(ctx context.Context) error {
		status, err := admin.FrontendStatus(ctx, f.Pods[pod-1])
		if err != nil {
			return err
		}
		for _, v := range status.GetVips() {
			if v.GetAdvertisement() != want {
				return fmt.Errorf("%s is %v in %s, want %v", v.GetVip(), v.GetAdvertisement(), podName(pod), want)
			}
		}
		return nil
	})
}
