package manifests

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/vipgate/vipgate/test/harness"
	cluster "github.com/vipgate/vipgate/test/kubernetes"
)

// foreign are kinds whose CustomResourceDefinitions belong to other projects.
var foreign = []string{"NetworkAttachmentDefinition", "PodMonitor", "PrometheusRule"}

// documents returns objects as YAML, those that others depend on first.
func documents(t *testing.T, o objects) string {
	t.Helper()
	first := []string{"Namespace", "CustomResourceDefinition", "ServiceAccount"}
	keys := slices.Sorted(maps.Keys(o))
	slices.SortStableFunc(keys, func(a, b string) int {
		rank := func(key string) int {
			kind, _, _ := strings.Cut(key, " ")
			if i := slices.Index(first, kind); i >= 0 {
				return i
			}
			return len(first)
		}
		return rank(a) - rank(b)
	})
	var text strings.Builder
	for _, key := range keys {
		if kind, _, _ := strings.Cut(key, " "); slices.Contains(foreign, kind) {
			continue
		}
		document, err := yaml.Marshal(o[key])
		harness.Must(t, err)
		text.WriteString("---\n" + string(document))
	}
	return text.String()
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deployments", file))
	harness.Must(t, err)
	return string(text)
}

// startCluster starts an API server with every object of the overlay, of the example and of the
// quickstart.
func startCluster(t *testing.T) (client *kubernetes.Clientset, all, quickstart objects) {
	t.Helper()
	quickstart = kustomize(t, filepath.Join(root, "deployments/quickstart"))
	all = overlay(t, "v0", "network-policy", "ingresses", "gateways", "gateway-password", "monitoring")
	manifests := []string{
		documents(t, kustomize(t, filepath.Join(root, "deployments/kubernetes"))),
		read(t, "example/namespace.yaml"),
		"{apiVersion: v1, kind: Namespace, metadata: {name: application-a}}",
		documents(t, kustomize(t, filepath.Join(root, "deployments/example"))),
		documents(t, all), // its Role replaces that of the example
		documents(t, quickstart),
		read(t, "example/namespace-role.yaml"),
		strings.Replace(read(t, "example/service.yaml"), "name: web", "name: web\n  namespace: trench-a", 1),
	}
	// The programs of the cluster are those of the main module.
	t.Chdir(root)
	c := cluster.Start(t)
	for _, text := range manifests {
		c.Apply(t, text)
	}
	client, err := kubernetes.NewForConfig(c.Admin())
	harness.Must(t, err)
	return client, all, quickstart
}

// The API server takes every object, and the pod of the Deployment with its admission.
func TestAPIServerAcceptsManifests(t *testing.T) {
	client, all, quickstart := startCluster(t)
	template := decode[appsv1.Deployment](t, all, deployment).Spec.Template
	pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
	pod.Name = "vipgate-1"
	options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	created, err := client.CoreV1().Pods(namespace).Create(t.Context(), pod, options)
	harness.Must(t, err)
	for _, v := range created.Spec.Volumes {
		if strings.HasPrefix(v.Name, "kube-api-access") {
			t.Error("the pod has a token for every container")
		}
	}
	if created.Spec.Priority == nil || *created.Spec.Priority < 1_000_000_000 {
		t.Errorf("the priority is %v", created.Spec.Priority)
	}

	// A Deployment is accepted with a pod template that no pod may have.
	for key, object := range quickstart {
		if object["kind"] != "Deployment" {
			continue
		}
		d := decode[appsv1.Deployment](t, objects{key: object}, key)
		pod := &corev1.Pod{ObjectMeta: d.Spec.Template.ObjectMeta, Spec: d.Spec.Template.Spec}
		pod.Name = d.Name
		if _, err := client.CoreV1().Pods(d.Namespace).Create(t.Context(), pod, options); err != nil {
			t.Error(err)
		}
	}

	for _, c := range []struct {
		allowed                    bool
		in, verb, group, of, named string
	}{
		{true, namespace, "watch", "vipgate.io", "trenches", ""},
		{true, namespace, "patch", "vipgate.io", "trenches/status", "trench-a"},
		{false, namespace, "patch", "vipgate.io", "trenches", "trench-a"},
		{true, namespace, "list", "", "services", ""},
		{true, namespace, "patch", "", "services/status", "web"},
		{false, namespace, "update", "", "services", "web"},
		{true, namespace, "watch", "", "pods", ""},
		{false, namespace, "patch", "", "pods/status", "vipgate-1"},
		{true, namespace, "create", "vipgate.io", "trenchreports", ""},
		{true, namespace, "patch", "vipgate.io", "trenchreports", "vipgate-1"},
		{false, namespace, "delete", "vipgate.io", "trenchreports", "vipgate-1"},
		{false, namespace, "patch", "", "pods", "vipgate-1"},
		{false, namespace, "delete", "", "pods", "web-1"},
		{false, namespace, "create", "", "pods/exec", "web-1"},
		{true, namespace, "watch", "discovery.k8s.io", "endpointslices", ""},
		{true, namespace, "watch", "", "secrets", "gateway-a-1"},
		{false, namespace, "get", "", "secrets", "other"},
		{false, namespace, "list", "", "secrets", ""},
		{true, namespace, "create", "coordination.k8s.io", "leases", ""},
		{true, namespace, "update", "coordination.k8s.io", "leases", "vipgate-trench-a"},
		{true, namespace, "update", "coordination.k8s.io", "leases", "turn-vipgate-trench-a"},
		{false, namespace, "update", "coordination.k8s.io", "leases", "other"},
		{true, namespace, "create", "", "events", ""},
		{true, namespace, "patch", "networking.k8s.io", "ingresses/status", "web"},
		{true, namespace, "watch", "gateway.networking.k8s.io", "gateways", ""},
		{true, namespace, "patch", "gateway.networking.k8s.io", "gateways/status", "web"},
		{false, namespace, "patch", "gateway.networking.k8s.io", "gateways", "web"},
		{true, "application-a", "watch", "", "pods", ""},
		{true, "application-a", "patch", "", "services/status", "web"},
		{false, "application-a", "patch", "", "pods/status", "web-1"},
		{false, "application-a", "get", "", "secrets", "gateway-a-1"},
		{false, "default", "list", "", "pods", ""},
		{false, "", "list", "", "pods", ""},
		{false, "", "list", "", "nodes", ""},
		{false, "", "list", "", "namespaces", ""},
	} {
		resource, subresource, _ := strings.Cut(c.of, "/")
		review, err := client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(),
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:serviceaccount:trench-a:vipgate",
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Namespace: c.in, Verb: c.verb, Group: c.group, Resource: resource, Subresource: subresource, Name: c.named,
				},
			}}, metav1.CreateOptions{})
		harness.Must(t, err)
		if review.Status.Allowed != c.allowed {
			t.Errorf("%s %s %s in %q is allowed: %t", c.verb, c.of, c.named, c.in, review.Status.Allowed)
		}
	}
}
