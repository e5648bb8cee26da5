package kubee2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcoordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typednetworkingv1 "k8s.io/client-go/kubernetes/typed/networking/v1"
	"k8s.io/client-go/rest"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	kubev1 "github.com/vipgate/vipgate/pkg/api/kube/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

// publishTimeout bounds a thousand writes on a machine with other load.
const publishTimeout = 3 * time.Minute

// listInterval is the time between two lists of many objects.
const listInterval = 100 * time.Millisecond

// auditPolicy records requests that write status, with their bodies, and requests for Leases.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Request
    resources:
      - {group: "", resources: [services, services/status]}
      - {group: networking.k8s.io, resources: [ingresses/status]}
      - {group: coordination.k8s.io, resources: [leases]}
  - level: None
`

// bindings give the service accounts of all pods the Role of the base and the Role of the
// component ingresses.
const bindings = `
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: pods, namespace: trench-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: vipgate}
subjects: [{kind: Group, apiGroup: rbac.authorization.k8s.io, name: "system:serviceaccounts:trench-a"}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: ingresses, namespace: trench-a}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: ingresses}
subjects: [{kind: Group, apiGroup: rbac.authorization.k8s.io, name: "system:serviceaccounts:trench-a"}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: ingresses, namespace: trench-a}
rules: [{apiGroups: [networking.k8s.io], resources: [ingresses], verbs: [get, list, watch]}]
`

const ingressStatus = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: ingresses, namespace: trench-a}
rules:
  - {apiGroups: [networking.k8s.io], resources: [ingresses], verbs: [get, list, watch]}
  - {apiGroups: [networking.k8s.io], resources: [ingresses/status], verbs: [patch]}
`

const publishing = `
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: trench-a}
spec:
  attractor:
    name: attractor-a
    vips: [20.0.0.1/32]
    gateways: [{name: gateway-a, address: 169.254.100.150, remoteASN: 64512}]
  publish: {addresses: [ADDRESS], ingressClass: external}
`

const publisherPodManifest = `
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: trench-a, labels: {vipgate.io/trench-pod: trench-a}}
spec:
  serviceAccountName: NAME
  containers: [{name: kube, image: vipgate/kube}]
`

// publishers are kubes of one trench without a frontend, and an API server that records their
// writes.
type publishers struct {
	t         *testing.T
	cluster   *kubernetes.Cluster
	core      *typedcorev1.CoreV1Client
	ingresses typednetworkingv1.IngressInterface
	leases    typedcoordinationv1.LeaseInterface
	audit     string // file
	read      int64  // offset in audit up to which requests are in seen
	seen      []request
	pods      []*publisherPod
}

// publisherPod is a kube. Its service account, and thus the user of its requests, has its name.
type publisherPod struct {
	*lab.Process
	name, socket string
}

func newPublishers(t *testing.T, pods, ingresses int, manifests ...string) *publishers {
	t.Helper()
	t.Parallel()
	dir := t.TempDir()
	p := &publishers{t: t, audit: filepath.Join(dir, "audit.log")}
	policy := filepath.Join(dir, "policy.yaml")
	p.must(os.WriteFile(policy, []byte(auditPolicy), 0o600))
	p.cluster = kubernetes.Start(t, kubernetes.WithArgs("--audit-policy-file="+policy, "--audit-log-path="+p.audit))
	client, err := rest.HTTPClientFor(p.cluster.Admin())
	p.must(err)
	t.Cleanup(client.CloseIdleConnections)
	p.core, err = typedcorev1.NewForConfigAndClient(p.cluster.Admin(), client)
	p.must(err)
	networking, err := typednetworkingv1.NewForConfigAndClient(p.cluster.Admin(), client)
	p.must(err)
	p.ingresses = networking.Ingresses(namespace)
	coordination, err := typedcoordinationv1.NewForConfigAndClient(p.cluster.Admin(), client)
	p.must(err)
	p.leases = coordination.Leases(namespace)

	p.apply("{apiVersion: v1, kind: Namespace, metadata: {name: " + namespace + "}}")
	for _, file := range append(slices.Clone(definitions), base+"role.yaml") {
		text, err := os.ReadFile(filepath.Join("../..", file))
		p.must(err)
		p.cluster.ApplyIn(t, namespace, string(text))
	}
	p.apply(bindings)
	for _, m := range manifests {
		p.apply(m)
	}
	p.publish("192.0.2.1")
	p.createIngresses(ingresses)
	for i := range pods {
		p.start(fmt.Sprintf("kube-%d", i))
	}
	return p
}

func (p *publishers) must(err error) {
	p.t.Helper()
	harness.Must(p.t, err)
}

func (p *publishers) apply(manifest string) {
	p.t.Helper()
	p.cluster.Apply(p.t, manifest)
}

// publish changes the address that the Trench publishes.
func (p *publishers) publish(address string) {
	p.t.Helper()
	p.apply(strings.Replace(publishing, "ADDRESS", address, 1))
}

func (p *publishers) createIngresses(n int) {
	p.t.Helper()
	class := "external"
	var group errgroup.Group
	group.SetLimit(8)
	for i := range n {
		group.Go(func() error {
			_, err := p.ingresses.Create(p.t.Context(), &networkingv1.Ingress{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("site-%04d", i)},
				Spec: networkingv1.IngressSpec{IngressClassName: &class, DefaultBackend: &networkingv1.IngressBackend{
					Service: &networkingv1.IngressServiceBackend{
						Name: "site", Port: networkingv1.ServiceBackendPort{Number: 80},
					},
				}},
			}, metav1.CreateOptions{})
			return err
		})
	}
	p.must(group.Wait())
}

// start starts a kube in a separate network namespace, where it reaches the API server through a
// proxy.
func (p *publishers) start(name string) {
	p.t.Helper()
	ns, dir := lab.NewNetNS(p.t), p.t.TempDir()
	var listener net.Listener
	p.must(ns.Do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	p.cluster.ServiceAccount(p.t, namespace, name)
	p.apply(strings.ReplaceAll(publisherPodManifest, "NAME", name))
	config := p.cluster.ProxyOn(p.t, listener).Config(p.cluster.PodServiceAccount(p.t, namespace, name, name))
	socket := filepath.Join(dir, "kube.sock")
	process, err := lab.StartProcess(ns, dir, name, filepath.Join(binaries, "kube"), "run",
		"--namespace="+namespace, "--trench=trench-a", "--pod-name="+name,
		"--kubeconfig="+p.cluster.Kubeconfig(p.t, config), "--trench-file="+filepath.Join(dir, "trench.yaml"),
		"--key-dir="+filepath.Join(dir, "keys"), "--frontend-admin-socket=unix://"+filepath.Join(dir, "frontend.sock"),
		"--admin-socket=unix://"+socket, "--log-format=text")
	p.must(err)
	p.t.Cleanup(func() {
		harness.Check(p.t, process.Kill())
		if p.t.Failed() {
			p.t.Logf("== last lines of %s\n%s", name, process.Tail(30))
		}
	})
	p.pods = append(p.pods, &publisherPod{process, name, socket})
}

// wait waits until condition returns nil.
func (p *publishers) wait(condition func(context.Context) error) {
	p.t.Helper()
	ctx := harness.Context(p.t, publishTimeout)
	p.must(lab.Eventually(ctx, listInterval, func() error { return condition(ctx) }))
}

// awaitPublished waits until all Ingresses have an address.
func (p *publishers) awaitPublished(address string) {
	p.t.Helper()
	p.wait(func(ctx context.Context) error {
		list, err := p.ingresses.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		without := 0
		for _, i := range list.Items {
			if s := i.Status.LoadBalancer.Ingress; len(s) != 1 || s[0].IP != address {
				without++
			}
		}
		if without > 0 {
			return fmt.Errorf("%d of %d Ingresses do not have the address %s", without, len(list.Items), address)
		}
		return nil
	})
}

func (p *publishers) holder(ctx context.Context) string {
	l, err := p.leases.Get(ctx, "vipgate-trench-a", metav1.GetOptions{})
	if err != nil || l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}

// leader returns the pod that holds the Lease, and the second pod.
func (p *publishers) leader() (leader, other *publisherPod) {
	p.t.Helper()
	p.wait(func(ctx context.Context) error {
		switch p.holder(ctx) {
		case p.pods[0].name:
			leader, other = p.pods[0], p.pods[1]
		case p.pods[1].name:
			leader, other = p.pods[1], p.pods[0]
		default:
			return fmt.Errorf("no pod holds the Lease")
		}
		return nil
	})
	return leader, other
}

// request is a request that the API server received.
type request struct {
	user           string // name of a service account, or of another user
	verb, resource string // with subresource
	name           string
	code           int32
	body           string
	received, done time.Time
}

// requests returns the requests that the API server has answered.
func (p *publishers) requests() []request {
	p.t.Helper()
	file, err := os.Open(p.audit)
	p.must(err)
	defer file.Close()
	_, err = file.Seek(p.read, io.SeekStart)
	p.must(err)
	for lines := bufio.NewReader(file); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return p.seen // the last line may be incomplete
		}
		p.read += int64(len(line))
		p.seen = append(p.seen, p.request(line))
	}
}

func (p *publishers) request(line []byte) request {
	p.t.Helper()
	var e struct {
		Verb                     string
		User                     struct{ Username string }
		ObjectRef                struct{ Resource, Subresource, Name string }
		ResponseStatus           struct{ Code int32 }
		RequestObject            json.RawMessage
		RequestReceivedTimestamp metav1.MicroTime
		StageTimestamp           metav1.MicroTime
	}
	p.must(json.Unmarshal(line, &e))
	return request{
		user: e.User.Username[strings.LastIndexByte(e.User.Username, ':')+1:], verb: e.Verb,
		resource: strings.Trim(e.ObjectRef.Resource+"/"+e.ObjectRef.Subresource, "/"),
		name:     e.ObjectRef.Name, code: e.ResponseStatus.Code, body: string(e.RequestObject),
		received: e.RequestReceivedTimestamp.Time, done: e.StageTimestamp.Time,
	}
}

// statusWrites returns the requests of a user, or of all users if user is "", that write the
// status of a resource and contain text in their body.
func statusWrites(all []request, user, resource, text string) (found []request) {
	for _, r := range all {
		if r.resource == resource+"/status" && r.verb == "patch" && (user == "" || r.user == user) &&
			strings.Contains(r.body, text) {
			found = append(found, r)
		}
	}
	return found
}

// awaitWrites waits until Ingresses have received n writes of an address.
func (p *publishers) awaitWrites(user, address string, n int) {
	p.t.Helper()
	p.wait(func(context.Context) error {
		if got := len(statusWrites(p.requests(), user, "ingresses", address)); got < n {
			return fmt.Errorf("%d writes of %s, want %d", got, address, n)
		}
		return nil
	})
}

func (p *publishers) awaitHolder(pod *publisherPod) {
	p.t.Helper()
	p.wait(func(ctx context.Context) error {
		if h := p.holder(ctx); h != pod.name {
			return fmt.Errorf("the Lease has %q, want %s", h, pod.name)
		}
		return nil
	})
}

// awaitLeaderOf waits until the status of pod shows leader.
func (p *publishers) awaitLeaderOf(pod, leader *publisherPod) {
	p.t.Helper()
	client := kubev1.NewKubeServiceClient(p.dial(pod))
	p.wait(func(ctx context.Context) error {
		r, err := client.GetStatus(ctx, &adminv1.GetStatusRequest{})
		if err != nil {
			return err
		}
		if l := r.GetLeader(); l != leader.name {
			return fmt.Errorf("%s shows the leader %q, want %s", pod.name, l, leader.name)
		}
		return nil
	})
}

// dial connects to the admin socket of a kube.
func (p *publishers) dial(pod *publisherPod) *grpc.ClientConn {
	p.t.Helper()
	connection, err := grpc.NewClient("unix://"+pod.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	p.must(err)
	p.t.Cleanup(func() { _ = connection.Close() })
	return connection
}

// watchHealth watches a health service and returns a function that returns all received states.
func (p *publishers) watchHealth(pod *publisherPod, name string) func() []healthState {
	p.t.Helper()
	stream, err := healthv1.NewHealthClient(p.dial(pod)).Watch(p.t.Context(),
		&healthv1.HealthCheckRequest{Service: name})
	p.must(err)
	var mu sync.Mutex
	var states []healthState
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			mu.Lock()
			states = append(states, r.GetStatus())
			mu.Unlock()
		}
	})
	p.t.Cleanup(reading.Wait) // after the end of the test's context
	return func() []healthState {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(states)
	}
}

type healthState = healthv1.HealthCheckResponse_ServingStatus

// want returns an error unless the last state is state.
func want(states []healthState, state healthState) error {
	if len(states) == 0 || states[len(states)-1] != state {
		return fmt.Errorf("health states %v, want %v last", states, state)
	}
	return nil
}

// after returns the requests that were received after a time.
func after(all []request, t time.Time) []request {
	return slices.DeleteFunc(slices.Clone(all), func(r request) bool { return !r.received.After(t) })
}

// find returns the first request that matches.
func find(t *testing.T, all []request, match func(request) bool) request {
	t.Helper()
	i := slices.IndexFunc(all, match)
	if i < 0 {
		t.Fatal("the API server received no such request")
	}
	return all[i]
}
