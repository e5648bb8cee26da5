package kubee2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/pkg/kube/v1alpha1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

const publishObjects = `
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: a-second-trench, namespace: trench-a}
spec: {attractor: {name: a, vips: [20.0.9.1/32]}}
---
apiVersion: v1
kind: Pod
metadata: {name: trench-a-1, namespace: trench-a, labels: {vipgate.io/trench-pod: trench-a}}
spec: {containers: [{name: frontend, image: frontend}]}
status: {phase: Running, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: mine, namespace: trench-a}
spec: {ingressClassName: external, defaultBackend: {service: {name: web, port: {number: 8080}}}}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: annotated, namespace: trench-a, annotations: {kubernetes.io/ingress.class: external}}
spec: {defaultBackend: {service: {name: web, port: {number: 8080}}}}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: foreign, namespace: trench-a}
spec: {ingressClassName: internal, defaultBackend: {service: {name: web, port: {number: 8080}}}}
`

const publishTrench = `
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: trench-a}
spec: {attractor: {name: a, vips: [20.0.0.1/32, "2000::1/128"]}, publish: PUBLISH}
`

const publishGateways = `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: mine, namespace: trench-a}
spec: {gatewayClassName: external, listeners: [{name: http, port: 80, protocol: HTTP}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: foreign, namespace: trench-a}
spec: {gatewayClassName: internal, listeners: [{name: http, port: 80, protocol: HTTP}]}
`

var (
	serviceResource = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	ingressResource = networkingv1.SchemeGroupVersion.WithResource("ingresses")
	gatewayResource = schema.GroupVersionResource{
		Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways",
	}
)

// publisher is a trench pod that only runs kube, with the Role of the manifests.
type publisher struct {
	*testing.T
	cluster *kubernetes.Cluster
	objects dynamic.Interface
	core    *typedcorev1.CoreV1Client
	pod     *lab.Pod
	args    []string // of kube
	kube    *lab.Process
}

func newPublisher(t *testing.T) *publisher {
	t.Helper()
	t.Parallel()
	p := &publisher{T: t, cluster: kubernetes.Start(t)}
	client, err := rest.HTTPClientFor(p.cluster.Admin())
	p.must(err)
	t.Cleanup(client.CloseIdleConnections)
	p.objects, err = dynamic.NewForConfigAndClient(p.cluster.Admin(), client)
	p.must(err)
	p.core, err = typedcorev1.NewForConfigAndClient(p.cluster.Admin(), client)
	p.must(err)
	p.cluster.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+namespace+"}}")
	for _, file := range definitions {
		p.cluster.Apply(t, p.file(file))
	}
	p.cluster.ApplyIn(t, namespace, strings.Replace(p.file(base+"rolebinding.yaml"), "  - kind: ServiceAccount\n",
		"  - kind: ServiceAccount\n    namespace: "+namespace+"\n", 1))
	p.cluster.Apply(t, publishObjects)
	return p
}

// start starts kube once its objects and its Role exist.
func (p *publisher) start() {
	p.Helper()
	l, err := lab.New()
	p.must(err)
	p.pod = &lab.Pod{Lab: l, Binaries: binaries}
	p.Cleanup(func() {
		if p.Failed() && p.kube != nil {
			p.Logf("== last lines of kube\n%s", p.kube.Tail(30))
		}
		harness.Check(p, l.Close())
	})
	var listener net.Listener
	p.must(l.Pod.Do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	config := p.cluster.ProxyOn(p.T, listener).Config(p.cluster.ServiceAccount(p.T, namespace, "vipgate"))
	p.must(os.MkdirAll(filepath.Dir(p.pod.TrenchFile()), 0o755))
	p.args = []string{
		filepath.Join(binaries, "kube"), "run", "--trench=trench-a",
		"--namespace=" + namespace, "--pod-name=" + podName(1), "--kubeconfig=" + p.cluster.Kubeconfig(p.T, config),
		"--trench-file=" + p.pod.TrenchFile(), "--key-dir=" + filepath.Join(l.Dir, "keys"),
		"--frontend-admin-socket=unix://" + p.pod.FrontendAdmin(), "--admin-socket=" + p.socket(), "--log-format=text",
	}
	p.restart()
}

// restart starts kube again after its exit.
func (p *publisher) restart() {
	p.Helper()
	var err error
	p.kube, err = p.pod.Lab.Start(p.pod.Lab.Pod, "kube", p.args...)
	p.must(err)
}

func (p *publisher) socket() string { return "unix://" + filepath.Join(p.pod.Lab.Dir, "kube.sock") }

func (p *publisher) must(err error) {
	p.Helper()
	harness.Must(p, err)
}

func (p *publisher) file(path string) string {
	p.Helper()
	text, err := os.ReadFile(filepath.Join("../..", path))
	p.must(err)
	return string(text)
}

func (p *publisher) wait(condition func(context.Context) error) {
	p.Helper()
	p.waitEvery(pollInterval, condition)
}

func (p *publisher) waitEvery(interval time.Duration, condition func(context.Context) error) {
	p.Helper()
	ctx := harness.Context(p, waitTimeout)
	p.must(lab.Eventually(ctx, interval, func() error { return condition(ctx) }))
}

// role applies the Role of the base with the rules of components, without the rules of a resource.
func (p *publisher) role(without string, components ...string) {
	p.Helper()
	var role map[string]any
	p.must(yaml.Unmarshal([]byte(p.file(base+"role.yaml")), &role))
	rules := role["rules"].([]any)
	for _, c := range components {
		var component struct{ Patches []struct{ Patch string } }
		p.must(yaml.Unmarshal([]byte(p.file("deployments/components/"+c+"/kustomization.yaml")), &component))
		for _, patch := range component.Patches {
			var operations []struct{ Value any }
			p.must(yaml.Unmarshal([]byte(patch.Patch), &operations))
			for _, o := range operations {
				rules = append(rules, o.Value)
			}
		}
	}
	role["rules"] = slices.DeleteFunc(rules, func(r any) bool {
		return slices.Contains(r.(map[string]any)["resources"].([]any), any(without))
	})
	text, err := json.Marshal(role)
	p.must(err)
	p.cluster.ApplyIn(p.T, namespace, string(text))
}

// publish applies the Trench with a spec.publish.
func (p *publisher) publish(publish string) {
	p.Helper()
	p.cluster.Apply(p.T, strings.Replace(publishTrench, "PUBLISH", publish, 1))
}

// status merges a status into an object, as its controller does.
func (p *publisher) status(resource schema.GroupVersionResource, name, status string) {
	p.Helper()
	_, err := p.objects.Resource(resource).Namespace(namespace).Patch(p.Context(), name, types.MergePatchType,
		[]byte(`{"status": `+status+`}`), metav1.PatchOptions{FieldManager: "controller"}, "status")
	p.must(err)
}

// patch merges into an object.
func (p *publisher) patch(resource schema.GroupVersionResource, name, patch string) {
	p.Helper()
	_, err := p.objects.Resource(resource).Namespace(namespace).Patch(p.Context(), name, types.MergePatchType,
		[]byte(patch), metav1.PatchOptions{FieldManager: "user"})
	p.must(err)
}

// wantPublished waits until the condition Published has a reason and a message that contains text.
func (p *publisher) wantPublished(reason, message string) {
	p.Helper()
	p.wait(func(ctx context.Context) error {
		u, err := p.objects.Resource(v1alpha1.Resource).Namespace(namespace).Get(ctx, "trench-a", metav1.GetOptions{})
		if err != nil {
			return err
		}
		t, err := v1alpha1.FromUnstructured(u)
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(t.Status.Conditions, v1alpha1.Published)
		if c == nil || c.Reason != reason || !strings.Contains(c.Message, message) || c.ObservedGeneration != t.Generation {
			return fmt.Errorf("condition %+v of generation %d, want %s: %s", c, t.Generation, reason, message)
		}
		if (c.Status == metav1.ConditionTrue) != (reason == "Published") {
			return fmt.Errorf("status %s with reason %s", c.Status, reason)
		}
		return nil
	})
}

// wantStatus waits until `kube status` contains a text, and checks its exit status.
func (p *publisher) wantStatus(good bool, text string) {
	p.Helper()
	p.waitEvery(processInterval, func(ctx context.Context) error {
		out, err := p.pod.Run(ctx, "kube", "status", "--admin-socket="+p.socket())
		if !strings.Contains(out, text) || good != (err == nil) {
			return fmt.Errorf("status %v, want %q:\n%s", err, text, out)
		}
		return nil
	})
}

// wantEvent waits for an Event of the Trench.
func (p *publisher) wantEvent(kind, reason string) {
	p.Helper()
	p.wait(func(ctx context.Context) error {
		list, err := p.core.Events(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Kind == "Trench" && e.Reason == reason && e.Type == kind {
				return nil
			}
		}
		return fmt.Errorf("none of %d Events is %s", len(list.Items), reason)
	})
}

// shown returns the addresses of an object, each with its mode or type.
func (p *publisher) shown(ctx context.Context, resource schema.GroupVersionResource, name string) (string, error) {
	u, err := p.objects.Resource(resource).Namespace(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	list, _, err := unstructured.NestedSlice(u.Object, "status", "loadBalancer", "ingress")
	if resource == gatewayResource {
		list, _, err = unstructured.NestedSlice(u.Object, "status", "addresses")
	}
	if err != nil {
		return "", err
	}
	var all []string
	for _, x := range list {
		var words []string
		for _, field := range []string{"type", "value", "ip", "hostname", "ipMode"} {
			if text, ok := x.(map[string]any)[field].(string); ok {
				words = append(words, text)
			}
		}
		if _, ok := x.(map[string]any)["ports"]; ok {
			words = append(words, "ports")
		}
		all = append(all, strings.Join(words, " "))
	}
	return strings.Join(all, ", "), nil
}

func (p *publisher) wantShown(resource schema.GroupVersionResource, name, want string) {
	p.Helper()
	p.wait(func(ctx context.Context) error {
		got, err := p.shown(ctx, resource, name)
		if err == nil && got != want {
			err = fmt.Errorf("%s %s shows %q, want %q", resource.Resource, name, got, want)
		}
		return err
	})
}

// conditions returns the conditions that vipgate wrote to a Service: their status by type.
func (p *publisher) conditions(ctx context.Context, name string) (map[string]metav1.ConditionStatus, error) {
	s, err := p.core.Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	all := map[string]metav1.ConditionStatus{}
	for _, c := range s.Status.Conditions {
		if kind, ok := strings.CutPrefix(c.Type, v1alpha1.Group+"/"); ok {
			all[kind] = c.Status
		}
	}
	return all, nil
}

func (p *publisher) wantCondition(service, kind string, want metav1.ConditionStatus) {
	p.Helper()
	p.wait(func(ctx context.Context) error {
		all, err := p.conditions(ctx, service)
		if err == nil && all[kind] != want {
			err = fmt.Errorf("conditions of Service %s are %v, want %s %s", service, all, kind, want)
		}
		return err
	})
}

// marker creates a Service that kube refuses, so that it has conditions.
func (p *publisher) marker(name string) {
	p.Helper()
	p.cluster.Apply(p.T, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: %s, namespace: trench-a, annotations: {vipgate.io/vips: 20.0.0.99}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  allocateLoadBalancerNodePorts: false
  ports: [{port: 80}]
`, name))
	p.wantCondition(name, v1alpha1.Accepted, metav1.ConditionFalse)
}

// leave removes a Service from the Trench, and waits until the Trench's conditions are removed
// from it.
func (p *publisher) leave(name string) {
	p.Helper()
	p.patch(serviceResource, name, `{"spec": {"type": "ClusterIP", "loadBalancerClass": null}}`)
	p.wait(func(ctx context.Context) error {
		all, err := p.conditions(ctx, name)
		if err == nil && len(all) > 0 {
			err = fmt.Errorf("Service %s still has %v", name, all)
		}
		return err
	})
}
