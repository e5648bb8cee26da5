package kubernetes

import (
	"context"
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// litter has an object of each kind that resets treat differently: with a finalizer, in a namespace,
// with an address of a Service, custom, and refusing other objects.
const litter = `
apiVersion: v1
kind: Namespace
metadata: {name: left}
---
apiVersion: v1
kind: Service
metadata: {name: left}
spec: {ports: [{port: 80}]}
---
apiVersion: v1
kind: Pod
metadata: {name: left, namespace: left, finalizers: [test.vipgate.io/never]}
spec: {containers: [{name: app, image: app}]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: left}
rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.test.vipgate.io}
spec:
  group: test.vipgate.io
  names: {kind: Thing, plural: things}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, properties: {FIELD: {type: string}}}}
---
apiVersion: test.vipgate.io/v1
kind: Thing
metadata: {name: left, namespace: left}
FIELD: text
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: left}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [secrets]}]
  validations: [{expression: "false", message: refused}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: left}
spec: {policyName: left, validationActions: [Deny]}
`

// TestAPIServerReset compares all objects of a new API server with the objects after a test and a
// reset, and applies the same objects again, with another schema.
func TestAPIServerReset(t *testing.T) {
	c := &Cluster{t: t, bound: -1}
	t.Cleanup(func() { harness.Check(t, c.end()) })
	harness.Must(t, c.create())
	objects, err := dynamic.NewForConfig(c.admin)
	harness.Must(t, err)
	secrets := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "secrets"}).Namespace("default")
	secret := func() error {
		_, err := secrets.Create(t.Context(), &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "tried"},
		}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	await.True(t, "the API server has created its objects", func() bool {
		all := c.everything(t)
		return len(all["v1 services"]) == 1 && len(all["v1 configmaps"]) == 2 &&
			len(all["networking.k8s.io/v1 ipaddresses"]) == 1 && len(all["coordination.k8s.io/v1 leases"]) == 1
	})
	fresh := c.everything(t)
	for _, field := range []string{"first", "second"} {
		c.Apply(t, strings.ReplaceAll(litter, "FIELD", field))
		c.ServiceAccount(t, "left", "left")
		await.True(t, "the policy is in force", func() bool { return secret() != nil })
		pods, err := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "pods"}).Watch(
			harness.Context(t, await.Timeout), metav1.ListOptions{})
		harness.Must(t, err)
		harness.Must(t, c.reset())
		harness.Must(t, secret())
		deleted := false
		for event := range pods.ResultChan() {
			if deleted = event.Type == watch.Deleted; deleted {
				break
			}
		}
		if pods.Stop(); !deleted {
			t.Error("a watch of Pods did not receive the deletion")
		}
		after := c.everything(t)
		for _, resource := range slices.Sorted(maps.Keys(after)) {
			if want := fresh[resource]; !slices.Equal(after[resource], want) {
				t.Errorf("%s after a reset: %q, want %q", resource, after[resource], want)
			}
		}
		for resource, want := range fresh {
			if after[resource] == nil {
				t.Errorf("%s after a reset: none, want %q", resource, want)
			}
		}
	}
}

// everything returns the names of all objects by resource, without those of resets and without Events:
// the API server writes one if it checks the address of its Service before it has allocated it.
func (c *Cluster) everything(t *testing.T) map[string][]string {
	t.Helper()
	client, err := discovery.NewDiscoveryClientForConfig(c.admin)
	harness.Must(t, err)
	lists, err := client.ServerPreferredResources()
	harness.Must(t, err)
	objects, err := dynamic.NewForConfig(c.admin)
	harness.Must(t, err)
	all := map[string][]string{}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		harness.Must(t, err)
		for _, resource := range list.APIResources {
			if resource.Kind == "Event" || !slices.Contains(resource.Verbs, "list") {
				continue
			}
			found, err := objects.Resource(version.WithResource(resource.Name)).List(context.Background(), metav1.ListOptions{})
			harness.Must(t, err)
			for _, object := range found.Items {
				if object.GetName() == barrier {
					continue
				}
				key := list.GroupVersion + " " + resource.Name
				all[key] = append(all[key], object.GetNamespace()+"/"+object.GetName())
			}
		}
	}
	for _, names := range all {
		slices.Sort(names) // those of componentstatuses are in random order
	}
	return all
}
