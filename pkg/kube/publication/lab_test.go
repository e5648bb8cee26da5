package publication

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/endpoint"
	"github.com/vipgate/vipgate/pkg/kube/cluster"
	"github.com/vipgate/vipgate/pkg/kube/translation"
	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/kubernetes"
)

// crd defines the kind Trench with the subresource and the list types that the tests need.
const crd = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: trenches.vipgate.io}
spec:
  group: vipgate.io
  scope: Namespaced
  names: {kind: Trench, plural: trenches, singular: trench, listKind: TrenchList}
  versions:
    - name: v1alpha1
      served: true
      storage: true
      subresources: {status: {}}
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec: {type: object, x-kubernetes-preserve-unknown-fields: true}
            status:
              type: object
              properties:
                observedGeneration: {type: integer, format: int64}
                holders:
                  type: array
                  x-kubernetes-list-type: atomic
                  items: {type: object, x-kubernetes-preserve-unknown-fields: true}
                conditions:
                  type: array
                  x-kubernetes-list-type: map
                  x-kubernetes-list-map-keys: [type]
                  items:
                    type: object
                    required: [type, status, lastTransitionTime, reason, message]
                    properties:
                      type: {type: string}
                      status: {type: string}
                      lastTransitionTime: {type: string, format: date-time}
                      observedGeneration: {type: integer, format: int64}
                      reason: {type: string, minLength: 1}
                      message: {type: string}
`

// namespaced holds the Trench a of namespace NS, two pods, and the minimum permissions that a
// publisher and its caches need.
const namespaced = `
apiVersion: v1
kind: Namespace
metadata: {name: NS}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: vipgate, namespace: NS}
rules:
  - {apiGroups: [vipgate.io], resources: [trenches], verbs: [get, list, watch]}
  - {apiGroups: [vipgate.io], resources: [trenches/status], verbs: [patch]}
  - {apiGroups: [""], resources: [services, pods], verbs: [get, list, watch]}
  - {apiGroups: [""], resources: [services/status], verbs: [patch]}
  - {apiGroups: [vipgate.io], resources: [trenchreports], verbs: [list, watch, create, patch]}
  - {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [get, list, watch]}
  - {apiGroups: [networking.k8s.io], resources: [ingresses], verbs: [get, list, watch]}
  - {apiGroups: [networking.k8s.io], resources: [ingresses/status], verbs: [patch]}
  - {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, create, update]}
  - {apiGroups: [events.k8s.io], resources: [events], verbs: [create, patch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: vipgate, namespace: NS}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: vipgate}
subjects: [{kind: ServiceAccount, name: kube, namespace: NS}]
---
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: a, namespace: NS}
spec: {attractor: ATTRACTOR}
---
apiVersion: v1
kind: Pod
metadata: {name: a-0, namespace: NS, labels: {vipgate.io/trench-pod: a}}
spec: {containers: [{name: kube, image: kube}]}
status: {phase: Running}
---
apiVersion: v1
kind: Pod
metadata: {name: a-1, namespace: NS, labels: {vipgate.io/trench-pod: a}}
spec: {containers: [{name: kube, image: kube}]}
status: {phase: Running}
`

const attractor = `{name: attractor-a, vips: [20.0.0.1/32, 20.0.0.2/32, 20.0.0.3/32, "2000::1/128"],
  gateways: [{name: gw, address: 169.254.100.150, remoteASN: 64512}]}`

// trenchOf returns the Trench with additional fields in its spec.
func trenchOf(fields string) string {
	return "apiVersion: vipgate.io/v1alpha1\nkind: Trench\nmetadata: {name: a, namespace: NS}\n" +
		"spec: {attractor: ATTRACTOR, " + fields + "}\n"
}

// web returns the Service web with VIPs.
func web(vips string) string {
	return `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: NS, annotations: {vipgate.io/vips: "` + vips + `"}}
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/a
  allocateLoadBalancerNodePorts: false
  selector: {app: web}
  ports: [{port: 8080, targetPort: 8080}]
`
}

// lab is a namespace of an API server with a Trench.
type lab struct {
	*testing.T
	cluster   *kubernetes.Cluster
	namespace string
	admin     dynamic.Interface
	config    *rest.Config // as the service account
}

func newLab(t *testing.T, c *kubernetes.Cluster) *lab {
	t.Helper()
	admin, err := dynamic.NewForConfig(c.Admin())
	if err != nil {
		t.Fatal(err)
	}
	name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
	l := &lab{T: t, cluster: c, namespace: strings.ReplaceAll(strings.ToLower(name), "_", "-"), admin: admin}
	l.apply(namespaced)
	l.config = c.ServiceAccount(t, l.namespace, "kube")
	return l
}

// apply applies manifests in the namespace of the lab.
func (l *lab) apply(manifests string) {
	l.Helper()
	l.cluster.Apply(l.T, strings.NewReplacer("NS", l.namespace, "ATTRACTOR", attractor).Replace(manifests))
}

func (l *lab) get(resource schema.GroupVersionResource, name string) *unstructured.Unstructured {
	l.Helper()
	u, err := l.admin.Resource(resource).Namespace(l.namespace).Get(l.Context(), name, metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	return u
}

func (l *lab) service(name string) *corev1.Service {
	l.Helper()
	s, err := convert[corev1.Service](l.get(services, name))
	if err != nil {
		l.Fatal(err)
	}
	return s
}

// ingress returns the published addresses of the Service web.
func (l *lab) ingress() string {
	l.Helper()
	return addresses(l.service("web").Status.LoadBalancer.Ingress)
}

func addresses(ingress []corev1.LoadBalancerIngress) string {
	var all []string
	for _, i := range ingress {
		all = append(all, i.IP+i.Hostname)
	}
	return strings.Join(all, " ")
}

// condition returns the status and reason of a condition of the Service web.
func (l *lab) condition(kind string) string {
	l.Helper()
	if c := find(l.service("web").Status.Conditions, "vipgate.io/"+kind); c != nil {
		return string(c.Status) + " " + c.Reason
	}
	return ""
}

func (l *lab) awaitIngress(want string) {
	l.Helper()
	await.True(l, "ingress "+want, func() bool { return l.ingress() == want })
}

func (l *lab) awaitCondition(kind, want string) {
	l.Helper()
	await.True(l, kind+" "+want, func() bool { return l.condition(kind) == want })
}

// events returns the number of Events of the Service web by reason, as shown by `kubectl
// describe`.
func (l *lab) events() map[string]int {
	l.Helper()
	s := l.service("web")
	list, err := l.admin.Resource(corev1.SchemeGroupVersion.WithResource("events")).Namespace(l.namespace).
		List(l.Context(), metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(s.UID)})
	if err != nil {
		l.Fatal(err)
	}
	counts := map[string]int{}
	for _, u := range list.Items {
		e, err := convert[corev1.Event](&u)
		if err != nil {
			l.Fatal(err)
		}
		counts[e.Reason]++
		if e.Series != nil {
			counts[e.Reason+" series"] = int(e.Series.Count)
		}
	}
	return counts
}

// publish sets the ingress of a Service like another controller.
func (l *lab) publish(name string, ingress ...corev1.LoadBalancerIngress) {
	l.Helper()
	patch, err := json.Marshal(map[string]any{"status": map[string]any{
		"loadBalancer": map[string]any{"ingress": ingress},
	}})
	if err != nil {
		l.Fatal(err)
	}
	_, err = l.admin.Resource(services).Namespace(l.namespace).Patch(l.Context(), name,
		"application/merge-patch+json", patch, metav1.PatchOptions{FieldManager: "other"}, "status")
	if err != nil {
		l.Fatal(err)
	}
}

// kube is the kube of one pod: caches, translation and publisher.
type kube struct {
	*Publisher
	frontend *fakeFrontend
	metrics  *counters
	stop     func() // stops it and waits
}

// fast sets short intervals of retries and of reports. No Lease expires and no probe fails because
// the test was not scheduled for some seconds.
func fast(p *Publisher) {
	p.timing.retry = 200 * time.Millisecond
	p.timing.report, p.timing.renewal, p.timing.restore = 50*time.Millisecond, time.Hour, time.Hour
}

// shortLease lets the Lease of a publisher expire within a test.
func shortLease(p *Publisher) { p.timing.lease, p.timing.renew = 3*time.Second, 2*time.Second }

// kube starts the kube of a pod, which ends with the test.
func (l *lab) kube(pod string, config *rest.Config, s *frontendv1.Status, changes ...func(*Publisher)) *kube {
	l.Helper()
	log := slog.New(slog.NewTextHandler(l.Output(), nil))
	objects, err := cluster.New(cluster.Options{Config: config, Namespace: l.namespace, Trench: "a", Log: log})
	if err != nil {
		l.Fatal(err)
	}
	in := latest.New(Input{})
	k := &kube{frontend: newFakeFrontend(l.T, s), metrics: &counters{n: map[string]int{}}}
	k.Publisher, err = New(Options{
		Config: objects.Config(), Namespace: l.namespace, Trench: "a", Pod: pod, AdminSocket: k.frontend.socket,
		Input: in, Metrics: k.metrics, Log: log,
	})
	if err != nil {
		l.Fatal(err)
	}
	fast(k.Publisher)
	for _, change := range changes {
		change(k.Publisher)
	}
	watching, endWatch := context.WithCancel(context.Background())
	running, end := context.WithCancel(context.Background())
	var watches, runs sync.WaitGroup
	watches.Go(func() { _ = objects.Run(watching) })
	watches.Go(func() {
		for {
			select {
			case <-watching.Done():
				return
			case <-objects.Changes():
			}
			if s, ok := objects.Snapshot(); ok {
				in.Set(Input{
					Objects:  s.Objects,
					Result:   translation.Translate(s.Objects, translation.Options{KeyDir: "/keys"}),
					Siblings: s.Siblings,
				})
			}
		}
	})
	runs.Go(func() {
		if err := k.Run(running); err != context.Canceled {
			l.Errorf("Run returned %v", err)
		}
	})
	k.stop = sync.OnceFunc(func() {
		end()
		runs.Wait()
		endWatch()
		watches.Wait()
	})
	l.Cleanup(k.stop)
	return k
}

// fakeFrontend is the admin socket of a frontend.
type fakeFrontend struct {
	frontendv1.UnimplementedFrontendServiceServer
	socket string
	status *latest.Value[*frontendv1.Status]
	t      *testing.T
	end    func()
	hangs  atomic.Bool // GetStatus does not return
}

func newFakeFrontend(t *testing.T, s *frontendv1.Status) *fakeFrontend {
	t.Helper()
	dir, err := os.MkdirTemp("", "vg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f := &fakeFrontend{socket: filepath.Join(dir, "admin.sock"), status: latest.New(s), t: t}
	f.start()
	return f
}

// start serves until end is called, or the test ends.
func (f *fakeFrontend) start() {
	f.t.Helper()
	listener, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Fatal(err)
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	frontendv1.RegisterFrontendServiceServer(server, f)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(listener) })
	f.end = sync.OnceFunc(func() {
		server.Stop()
		wg.Wait()
	})
	f.t.Cleanup(f.end)
}

func (f *fakeFrontend) GetStatus(ctx context.Context, _ *adminv1.GetStatusRequest,
) (*frontendv1.Status, error) {
	if f.hangs.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return f.status.Load(), nil
}

func (f *fakeFrontend) WatchStatus(_ *adminv1.WatchStatusRequest,
	stream grpc.ServerStreamingServer[frontendv1.Status],
) error {
	return endpoint.WatchStatus(stream.Context(), f.status, func() error {
		return stream.Send(f.status.Load())
	})
}

// counters counts writes by resource, and by the result if it is not written.
type counters struct {
	mu sync.Mutex
	n  map[string]int
}

func (c *counters) PublicationWrite(resource, result string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if result != written {
		resource += " " + result
	}
	c.n[resource]++
}

func (*counters) Leader(bool) {}

func (c *counters) count(what string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[what]
}
