package kubernetes_test

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
)

const first = `
apiVersion: v1
kind: ConfigMap
metadata: {name: first}
data: {key: value}
`

// client returns a client of the core API.
func client(t *testing.T, config *rest.Config) *typedcorev1.CoreV1Client {
	t.Helper()
	c, err := typedcorev1.NewForConfig(config)
	harness.Must(t, err)
	return c
}

// soon returns a context that ends long before the 10 s after which a refused client gives up.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx := harness.Context(t, 200*time.Millisecond)
	return ctx
}

// next returns the next event of a watch that is not a bookmark.
func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	timeout := time.After(await.Timeout)
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				t.Fatal("the watch ended")
			}
			if e.Type != watch.Bookmark {
				return e
			}
		case <-timeout:
			t.Fatal("no event")
		}
	}
}

// TestAPIServerClusterLife applies, watches, stops and starts, and compacts.
func TestAPIServerClusterLife(t *testing.T) {
	c := kubernetes.Start(t)
	ctx := t.Context()
	maps := client(t, c.Admin()).ConfigMaps("default")

	c.Apply(t, first)
	got, err := maps.Get(ctx, "first", metav1.GetOptions{})
	harness.Must(t, err)
	old := got.ResourceVersion
	w, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: old})
	harness.Must(t, err)
	c.Apply(t, strings.ReplaceAll(first, "first", "second"))
	if e := next(t, w); e.Type != watch.Added || e.Object.(*corev1.ConfigMap).Name != "second" {
		t.Fatalf("event %s of %v, want ADDED of second", e.Type, e.Object)
	}

	c.StopServer(t)
	await.True(t, "the watch ends with the API server", func() bool {
		_, open := <-w.ResultChan()
		return !open
	})
	if _, err := maps.Get(soon(t), "first", metav1.GetOptions{}); err == nil {
		t.Fatal("a stopped API server answered")
	}
	c.StartServer(t)
	if got, err = maps.Get(ctx, "second", metav1.GetOptions{}); err != nil {
		t.Fatalf("after the start on the same port: %v", err)
	}

	c.Compact(t)
	w, err = maps.Watch(ctx, metav1.ListOptions{ResourceVersion: old})
	if err == nil {
		defer w.Stop()
		err = apierrors.FromObject(next(t, w).Object)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Fatalf("a watch from a compacted revision: %v, want 410 Gone", err)
	}
	// The newest revision that a client can know is compacted, too.
	w, err = maps.Watch(ctx, metav1.ListOptions{ResourceVersion: got.ResourceVersion})
	if err == nil {
		defer w.Stop()
		err = apierrors.FromObject(next(t, w).Object)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Fatalf("a watch from the newest compacted revision: %v, want 410 Gone", err)
	}
}

// TestAPIServerUsersNeedBindings checks that RBAC applies to certificates and tokens.
func TestAPIServerUsersNeedBindings(t *testing.T) {
	c := kubernetes.Start(t)
	c.Apply(t, first)
	ctx := t.Context()
	for name, config := range map[string]*rest.Config{
		"certificate": c.User("reader", "readers"),
		"token":       c.ServiceAccount(t, "default", "reader"),
	} {
		_, err := client(t, config).ConfigMaps("default").Get(ctx, "first", metav1.GetOptions{})
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s without a binding: %v, want Forbidden", name, err)
		}
	}
	c.Apply(t, `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [configmaps], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects:
  - {kind: ServiceAccount, name: reader, namespace: default}
  - {kind: Group, name: readers, apiGroup: rbac.authorization.k8s.io}
`)
	for name, config := range map[string]*rest.Config{
		"certificate": c.User("reader", "readers"),
		"token":       c.ServiceAccount(t, "default", "reader"),
	} {
		maps := client(t, config).ConfigMaps("default")
		await.True(t, name+" with a binding reads", func() bool {
			_, err := maps.Get(ctx, "first", metav1.GetOptions{})
			return err == nil
		})
		if err := maps.Delete(ctx, "first", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s deletes: %v, want Forbidden", name, err)
		}
	}
}

// TestAPIServerApplyKindsAndStatus applies a custom kind, and the status of a Pod. The deletion of
// the Pod waits for the test, which acts as its kubelet.
func TestAPIServerApplyKindsAndStatus(t *testing.T) {
	c := kubernetes.Start(t)
	ctx := t.Context()
	c.Apply(t, `
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
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
---
apiVersion: test.vipgate.io/v1
kind: Thing
metadata: {name: thing}
---
apiVersion: v1
kind: Pod
metadata: {name: app}
spec: {nodeName: node-1, terminationGracePeriodSeconds: 30, containers: [{name: app, image: app}]}
status: {phase: Running, podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}], conditions: [{type: Ready, status: "True"}]}
`)
	pods := client(t, c.Admin()).Pods("default")
	pod, err := pods.Get(ctx, "app", metav1.GetOptions{})
	harness.Must(t, err)
	if pod.Status.Phase != corev1.PodRunning || pod.Status.PodIP != "10.0.0.1" || len(pod.Status.Conditions) != 1 {
		t.Fatalf("status %+v, want that of the manifest", pod.Status)
	}
	harness.Must(t, pods.Delete(ctx, "app", metav1.DeleteOptions{}))
	if pod, err = pods.Get(ctx, "app", metav1.GetOptions{}); err != nil || pod.DeletionTimestamp == nil {
		t.Fatalf("after the deletion: %v, error %v, want a deletion timestamp", pod.DeletionTimestamp, err)
	}
	now := int64(0)
	harness.Must(t, pods.Delete(ctx, "app", metav1.DeleteOptions{GracePeriodSeconds: &now}))
	if _, err = pods.Get(ctx, "app", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Fatalf("after the end of the grace period: %v, want NotFound", err)
	}
}

// TestAPIServerProxyDelaysAndCuts checks both faults with requests and a watch.
func TestAPIServerProxyDelaysAndCuts(t *testing.T) {
	c := kubernetes.Start(t)
	p := c.Proxy(t)
	maps := client(t, p.Config(c.Admin())).ConfigMaps("default")
	w, err := maps.Watch(t.Context(), metav1.ListOptions{})
	harness.Must(t, err)
	defer w.Stop()

	p.Delay(time.Hour)
	if _, err := maps.List(soon(t), metav1.ListOptions{}); err == nil {
		t.Fatal("answered within the delay")
	}
	c.Apply(t, first)
	p.Delay(0) // also for the event in transit
	for {
		e := next(t, w)
		m, ok := e.Object.(*corev1.ConfigMap)
		if !ok {
			t.Fatalf("event %s of %v", e.Type, e.Object)
		}
		if m.Name == "first" {
			break
		}
	}

	p.Cut()
	await.True(t, "the watch ends with the cut", func() bool {
		_, open := <-w.ResultChan()
		return !open
	})
	if _, err := maps.List(soon(t), metav1.ListOptions{}); err == nil {
		t.Fatal("answered through a cut")
	}
	p.Restore()
	await.True(t, "requests after Restore", func() bool {
		_, err := maps.List(t.Context(), metav1.ListOptions{})
		return err == nil
	})
}
