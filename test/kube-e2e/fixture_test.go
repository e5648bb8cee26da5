package kubee2e

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
)

const (
	namespace   = "trench-a"
	trenchPods  = 2
	replicas    = 3            // of the application
	targets     = 2 * replicas // a rolling update replaces half of them
	vip4, vip6  = "20.0.0.1", "2000::1"
	route4      = vip4 + "/32"
	route6      = vip6 + "/128"
	network     = "trench-a/targets"
	serviceName = "web"

	// waitTimeout bounds every wait for a required event, far above the expected time.
	waitTimeout  = 60 * time.Second
	pollInterval = 10 * time.Millisecond
	// processInterval is the interval of polls that start a process.
	processInterval = 300 * time.Millisecond
)

// base is the directory of the Role that users apply.
const base = "deployments/base/"

// definitions are the objects of the cluster that users apply before the first Trench.
var definitions = []string{
	"deployments/kubernetes/crd.yaml", "deployments/kubernetes/reports.yaml", "deployments/kubernetes/admission.yaml",
}

// trench has timers that do not expire while the machine stalls. A closed port still fails a check
// without delay.
const trench = `
apiVersion: vipgate.io/v1alpha1
kind: Trench
metadata: {name: trench-a, namespace: trench-a}
spec:
  network: {name: trench-a/targets, subnets: [172.16.0.0/16, "fd00:16::/64"]}
  attractor:
    name: attractor-a
    vips: [20.0.0.1/32, "2000::1/128"]
    gateways:
      - {name: gateway-a4, address: GATEWAY4, holdTime: 240s}
      - {name: gateway-a6, address: "GATEWAY6", holdTime: 240s}
  defaults: {drainTime: 4s, check: {interval: 500ms, timeout: 500ms, fastInterval: 10ms, rise: 1, fall: 10}}
`

const service = `
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: trench-a
  annotations:
    vipgate.io/vips: "20.0.0.1,2000::1"
    vipgate.io/check: '{"tcp":{"port":5000}}'
    vipgate.io/drain-time: 15s
spec:
  type: LoadBalancer
  loadBalancerClass: vipgate.io/trench-a
  allocateLoadBalancerNodePorts: false
  ipFamilyPolicy: PreferDualStack
  selector: {app: web}
  ports: [{name: http, port: 8080}]
`

// fixture is a cluster of two trench pods behind a gateway, and of application pods that the test
// creates. Its processes end with the test.
type fixture struct {
	*lab.Topology
	t       *testing.T
	cluster *kubernetes.Cluster
	core    *typedcorev1.CoreV1Client
	gateway *lab.Gateway
	kubes   []*lab.Process
	kubelet *kubelet
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return newSecuredFixture(t, "")
}

// newSecuredFixture is newFixture with a TCP-MD5 password of the gateway's sessions.
func newSecuredFixture(t *testing.T, password string) *fixture {
	t.Helper()
	f := newCluster(t)
	var err error
	f.Topology, err = lab.NewTopology(lab.TopologyConfig{
		Pods: trenchPods, Targets: targets, Binaries: binaries,
		VIPs: []netip.Addr{netip.MustParseAddr(vip4), netip.MustParseAddr(vip6)},
	})
	f.must(err)
	t.Cleanup(f.close)
	f.kubelet = newKubelet(f)
	gateway := f.GatewayConfig()
	gateway.Password = password
	f.gateway, err = f.StartGateway(gateway)
	f.must(err)
	f.startKubes()
	return f
}

// newCluster starts only the API server of a fixture, with the objects that users install before
// the first Trench.
func newCluster(t *testing.T) *fixture {
	t.Helper()
	t.Parallel()
	f := &fixture{t: t, cluster: kubernetes.Start(t)}
	client, err := rest.HTTPClientFor(f.cluster.Admin())
	f.must(err)
	t.Cleanup(client.CloseIdleConnections)
	f.core, err = typedcorev1.NewForConfigAndClient(f.cluster.Admin(), client)
	f.must(err)
	f.install()
	return f
}

// install creates the namespace, the objects of the cluster, and the service account of kube with
// its Role.
func (f *fixture) install() {
	f.t.Helper()
	f.cluster.Apply(f.t, "{apiVersion: v1, kind: Namespace, metadata: {name: "+namespace+"}}")
	for _, path := range definitions {
		f.cluster.Apply(f.t, f.manifest(path))
	}
	for _, name := range []string{"serviceaccount.yaml", "role.yaml", "rolebinding.yaml"} {
		// Besides metadata, Kustomize only sets the namespace of a subject.
		text := strings.Replace(f.manifest(base+name), "  - kind: ServiceAccount\n",
			"  - kind: ServiceAccount\n    namespace: "+namespace+"\n", 1)
		f.cluster.ApplyIn(f.t, namespace, text)
	}
}

// manifest reads a file of the repository.
func (f *fixture) manifest(path string) string {
	f.t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", path))
	f.must(err)
	return string(text)
}

// close ends all processes and, after a failure, prints their logs.
func (f *fixture) close() {
	f.kubelet.close()
	if f.t.Failed() {
		processes := append([]*lab.Process{f.gateway.Process}, f.kubes...)
		for _, p := range f.Pods {
			processes = append(processes, p.LB, p.Frontend)
		}
		for _, p := range processes {
			if p != nil {
				f.t.Logf("== last lines of %s (pid %d)\n%s", p.Name, p.PID(), p.Tail(30))
			}
		}
	}
	harness.Check(f.t, f.Close())
}

func (f *fixture) must(err error) {
	f.t.Helper()
	harness.Must(f.t, err)
}

// wait waits until condition returns nil.
func (f *fixture) wait(condition func(context.Context) error) {
	f.t.Helper()
	f.waitEvery(pollInterval, condition)
}

func (f *fixture) waitEvery(interval time.Duration, condition func(context.Context) error) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(lab.Eventually(ctx, interval, func() error { return condition(ctx) }))
}

// podName returns the name of a trench pod; pods are numbered from 1.
func podName(pod int) string { return fmt.Sprintf("trench-a-%d", pod) }

// startKubes creates the trench pods and starts a kube in each with the token of its service
// account. kube reaches the API server through a proxy in the pod's network namespace.
func (f *fixture) startKubes() {
	f.t.Helper()
	for n, p := range f.Pods {
		f.createTrenchPod(n + 1)
		f.must(os.MkdirAll(filepath.Dir(p.TrenchFile()), 0o755))
		f.kubes = append(f.kubes, f.startKube(n+1, p.TrenchFile()))
	}
}

func (f *fixture) createTrenchPod(pod int) {
	f.t.Helper()
	f.cluster.Apply(f.t, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: trench-a, labels: {vipgate.io/trench-pod: trench-a}}
spec:
  nodeName: node-%d
  serviceAccountName: vipgate
  initContainers: [{name: kube, image: kube, restartPolicy: Always}]
  containers: [{name: lb, image: lb}, {name: frontend, image: frontend}]
  volumes: [{name: mounted, configMap: {name: mounted}}]
status:
  phase: Running
  conditions: [{type: Ready, status: "True"}]
  containerStatuses: [{name: lb, image: lb, imageID: "", ready: true, restartCount: 1, state: {running: {}}}]
`, podName(pod), pod))
}

// startKube starts the kube of a trench pod, with further flags.
func (f *fixture) startKube(pod int, trenchFile string, flags ...string) *lab.Process {
	f.t.Helper()
	p := f.Pods[pod-1]
	var l net.Listener
	f.must(p.NS.Do(func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	account := f.cluster.PodServiceAccount(f.t, namespace, "vipgate", podName(pod))
	config := f.cluster.ProxyOn(f.t, l).Config(account)
	command := []string{
		filepath.Join(binaries, "kube"), "run", "--namespace=" + namespace, "--trench=trench-a",
		"--pod-name=" + podName(pod), "--kubeconfig=" + f.cluster.Kubeconfig(f.t, config),
		"--trench-file=" + trenchFile, "--key-dir=" + filepath.Join(p.Dir, "keys"),
		"--frontend-admin-socket=unix://" + p.FrontendAdmin(),
		"--admin-socket=unix://" + filepath.Join(p.Dir, "kube.sock"), "--log-format=text",
	}
	kube, err := f.Start(p.NS, "kube-"+podName(pod), append(command, flags...)...)
	f.must(err)
	return kube
}

// startTrenchPods starts lb, with the data plane, and frontend in each trench pod after its kube
// has written the trench file, like the startup probe of a sidecar.
func (f *fixture) startTrenchPods() {
	f.t.Helper()
	for _, p := range f.Pods {
		f.wait(func(ctx context.Context) error {
			return admin.WantServing(ctx, filepath.Join(p.Dir, "kube.sock"), "Readiness")
		})
		if _, err := os.Stat(p.TrenchFile()); err != nil {
			f.t.Fatalf("kube is ready without a trench file: %v", err)
		}
		f.must(p.StartLB("--dataplane=nftables"))
		f.must(p.StartFrontend("--ecmp"))
	}
}

// trenchManifest returns the Trench with the addresses of the gateway.
func trenchManifest() string {
	return strings.NewReplacer("GATEWAY4", lab.GatewayA4.String(), "GATEWAY6", lab.GatewayA6.String()).Replace(trench)
}
