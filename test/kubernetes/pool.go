package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
)

// Tests are the tests of a package: [testing.M].
type Tests interface{ Run() int }

// Main returns tests that keep their clusters: a passed test leaves its cluster, without the objects
// that it created, to the next call of [Start] without options. The clusters end after the last
// test. Parallel tests have different clusters.
func Main(tests Tests) Tests { return pooled{tests} }

type pooled struct{ Tests }

// Run implements Tests.
func (p pooled) Run() int {
	shared.keep = true
	code := p.Tests.Run()
	if err := shared.end(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// shared has the clusters of the package's tests.
var shared pool

// pool holds clusters that no test uses.
type pool struct {
	keep bool // set before the first test

	mu   sync.Mutex
	idle []*Cluster
}

// start gives a cluster to a test.
func (p *pool) start(t testing.TB) *Cluster {
	t.Helper()
	c := p.take()
	used := c != nil
	if !used {
		c = &Cluster{bound: -1}
	}
	c.t = t
	t.Cleanup(func() { harness.Check(t, p.put(c)) })
	if used {
		if err := c.reset(); err != nil {
			t.Fatalf("failed to reset a cluster: %v", err)
		}
		return c
	}
	if err := c.create(); err != nil {
		t.Fatalf("failed to start a cluster: %v", err)
	}
	return c
}

// take returns an idle cluster, or nil.
func (p *pool) take() *Cluster {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.idle) == 0 {
		return nil
	}
	c := p.idle[0]
	p.idle = p.idle[1:]
	return c
}

// put returns the cluster of a finished test. It ends unless the test passed with a running API
// server.
func (p *pool) put(c *Cluster) error {
	if !p.keep || c.t.Failed() || c.server == nil {
		return c.end()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, c)
	return nil
}

// end ends the idle clusters.
func (p *pool) end() error {
	var errs []error
	for c := p.take(); c != nil; c = p.take() {
		errs = append(errs, c.end())
	}
	return errors.Join(errs...)
}

// systemNamespaces are created by the API server.
var systemNamespaces = []string{"default", "kube-node-lease", "kube-public", "kube-system"}

// created reports whether a key of etcd belongs to an object that the API server creates itself.
func created(key string) bool {
	parts := strings.Split(strings.TrimPrefix(key, registry), "/")
	kind, name := parts[0], parts[len(parts)-1]
	switch kind {
	case "apiregistration.k8s.io", // follow the CustomResourceDefinitions
		"ranges", "servicecidrs", "priorityclasses", "prioritylevelconfigurations", "flowschemas", "masterleases",
		"leases", "storageversions":
		return kind != "leases" || parts[1] == "kube-system"
	case "namespaces":
		return slices.Contains(systemNamespaces, name)
	case "clusterroles", "clusterrolebindings":
		return strings.HasPrefix(name, "system:") || slices.Contains([]string{"admin", "cluster-admin", "edit", "view"}, name)
	case "roles", "rolebindings", "configmaps":
		return strings.HasPrefix(parts[1], "kube-")
	case "ipaddresses":
		return name == "10.96.0.1"
	case "services":
		return name == "kubernetes" && parts[len(parts)-2] == "default"
	case "validatingadmissionpolicies", "validatingadmissionpolicybindings":
		return name == barrier
	}
	return false
}

// reset deletes the objects that tests created. It deletes them in etcd: no controller removes
// namespaces, no kubelet removes Pods, and finalizers would delay it. The caches of the API server
// follow, because they watch etcd.
func (c *Cluster) reset() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	client := c.etcdClient()
	defer client.CloseIdleConnections()
	all, err := keys(client, registry)
	if err != nil {
		return err
	}
	policies := false
	for len(all) > 0 {
		if created(all[0]) {
			all = all[1:]
			continue
		}
		// One request for all keys up to the next one that is kept.
		n := slices.IndexFunc(all, created)
		if n < 0 {
			n = len(all)
		}
		if err := deleteRange(client, all[0], all[n-1]); err != nil {
			return err
		}
		policies = policies || slices.ContainsFunc(all[:n], func(key string) bool {
			return strings.HasPrefix(key, registry+"validatingadmissionpolicies/")
		})
		all = all[n:]
	}
	tokens, err := filepath.Glob(filepath.Join(c.dir, "*.token"))
	if err != nil {
		return err
	}
	for _, token := range tokens {
		if err := os.Remove(token); err != nil {
			return err
		}
	}
	err = c.server.ready(func(context.Context) error {
		// The API server removes the APIService of each custom group after it stopped serving it.
		services, err := keys(client, apiServices)
		if err == nil && len(services) > c.services {
			err = fmt.Errorf("%d groups of custom resources are served", len(services)-c.services)
		}
		return err
	})
	if err == nil && policies {
		err = c.awaitPolicies(ctx)
	}
	return err
}

// barrier is the name of an admission policy, and of the ConfigMap that it refuses.
const barrier = "vipgate-test-reset"

// awaitPolicies waits until deleted admission policies have no effect. The API server reads its
// policies in the order of their changes, once a second: it changes a policy after the
// deletions, and waits for its effect.
func (c *Cluster) awaitPolicies(ctx context.Context) error {
	c.resets++
	message := fmt.Sprintf("reset %d", c.resets)
	err := apply(ctx, c.admin, metav1.NamespaceDefault, fmt.Sprintf(`
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: %[1]s}
spec:
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: object.metadata.name != '%[1]s', message: %[2]s}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: %[1]s}
spec: {policyName: %[1]s, validationActions: [Deny]}
`, barrier, message))
	if err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	objects, err := dynamic.NewForConfigAndClient(c.admin, client)
	if err != nil {
		return err
	}
	maps := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"})
	refused := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ConfigMap"}}
	refused.SetName(barrier)
	return c.server.ready(func(ctx context.Context) error {
		_, err := maps.Namespace(metav1.NamespaceDefault).Create(ctx, refused,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil && strings.Contains(err.Error(), message) {
			return nil
		}
		return fmt.Errorf("the changed admission policy is not in force: %w", err)
	})
}
