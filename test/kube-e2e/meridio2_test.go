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

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/lab/admin"
)

const meridio2Objects = `
apiVersion: v1
kind: Namespace
metadata: {name: ns-a}
---
apiVersion: v1
kind: Pod
metadata: {name: sllb-1, namespace: ns-a}
spec:
  containers: [{name: loadbalancer, image: lb}]
  readinessGates:
    - {conditionType: meridio-2.nordix.org/ipv4-connectivity}
    - {conditionType: meridio-2.nordix.org/ipv6-connectivity}
`

// meridio2Gateway is the Gateway of the pod, with or without VIPs.
const meridio2Gateway = `
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: gw-a, namespace: ns-a}
spec: {gatewayClassName: meridio}
status: {addresses: [VIPS]}
`

// meridio2Router has the values of Meridio 2's end-to-end suites, except for the timers: no session
// ends because the machine stalls.
const meridio2Router = `
apiVersion: meridio-2.nordix.org/v1alpha1
kind: GatewayRouter
metadata: {name: NAME, namespace: ns-a}
spec:
  gatewayRef: {name: gw-a}
  interface: INTERFACE
  address: "ADDRESS"
  protocol: BGP
  bgp:
    localASN: 64512
    remoteASN: 4200000000
    localPort: 10179
    remotePort: 10179
    holdTime: 240s
    bfd: {minTx: 300ms, minRx: 300ms, multiplier: 50}
`

const meridio2StaticRouter = `
apiVersion: meridio-2.nordix.org/v1alpha1
kind: GatewayRouter
metadata: {name: NAME, namespace: ns-a}
spec:
  gatewayRef: {name: gw-a}
  interface: INTERFACE
  address: "ADDRESS"
  protocol: Static
  static: {bfd: {minTx: 300ms, minRx: 300ms, multiplier: 3}}
`

// meridio2 is a load balancer pod of Meridio 2: kube and a frontend replace the router, and the
// test replaces the load balancer.
type meridio2 struct {
	*lab.Lab
	t         *testing.T
	cluster   *kubernetes.Cluster
	pods      typedcorev1.PodInterface
	pod       *lab.Pod
	gateway   *lab.Gateway
	frontend  *lab.Process
	readiness string // the directory of readiness files
}

func newMeridio2(t *testing.T) *meridio2 {
	t.Helper()
	t.Parallel()
	m := &meridio2{t: t, cluster: kubernetes.Start(t)}
	var err error
	m.Lab, err = lab.New()
	m.must(err)
	pod := &lab.Pod{Lab: m.Lab, Binaries: binaries}
	m.pod = pod
	var processes []*lab.Process
	t.Cleanup(func() {
		for _, p := range processes {
			if p != nil && t.Failed() {
				t.Logf("== last lines of %s (pid %d)\n%s", p.Name, p.PID(), p.Tail(30))
			}
		}
		m.must(m.Close())
	})
	client, err := rest.HTTPClientFor(m.cluster.Admin())
	m.must(err)
	t.Cleanup(client.CloseIdleConnections)
	core, err := typedcorev1.NewForConfigAndClient(m.cluster.Admin(), client)
	m.must(err)
	m.pods = core.Pods("ns-a")

	m.cluster.Apply(t, m.file("pkg/kube/meridio2/testdata/definitions.yaml"))
	m.cluster.Apply(t, meridio2Objects)
	m.setVIPs()
	m.cluster.ApplyIn(t, "ns-a", strings.Replace(m.file("deployments/meridio2/role.yaml"),
		"  - kind: ServiceAccount\n", "  - kind: ServiceAccount\n    namespace: ns-a\n", 1))
	c := lab.GatewayA()
	c.LocalAS, c.RemoteAS, c.BFD = 4200000000, 64512, true
	m.gateway, err = m.StartGateway(c)
	m.must(err)

	var l net.Listener
	m.must(m.Pod.Do(func() (err error) {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}))
	config := m.cluster.ProxyOn(t, l).Config(m.cluster.ServiceAccount(t, "ns-a", "stateless-load-balancer"))
	m.must(os.MkdirAll(filepath.Dir(pod.TrenchFile()), 0o755))
	kube, err := m.Start(m.Pod, "kube", filepath.Join(binaries, "kube"), "run", "--gateway=gw-a",
		"--namespace=ns-a", "--pod-name=sllb-1", "--kubeconfig="+m.cluster.Kubeconfig(t, config),
		"--trench-file="+pod.TrenchFile(), "--key-dir="+filepath.Join(m.Dir, "keys"),
		"--frontend-admin-socket=unix://"+pod.FrontendAdmin(),
		"--admin-socket=unix://"+filepath.Join(m.Dir, "kube.sock"), "--log-format=text")
	m.must(err)
	m.wait(func(ctx context.Context) error {
		return admin.WantServing(ctx, filepath.Join(m.Dir, "kube.sock"), "Readiness")
	})
	m.readiness = filepath.Join(m.Dir, "meridio")
	m.must(os.Mkdir(m.readiness, 0o755))
	m.frontend, err = m.Start(m.Pod, "frontend", filepath.Join(binaries, "frontend"), "run",
		"--trench-file="+pod.TrenchFile(), "--readiness-dir="+m.readiness, "--external-interface=lo",
		"--admin-socket=unix://"+pod.FrontendAdmin(), "--bird-dir="+pod.BirdDir(), "--bird-socket="+pod.BirdSocket(),
		"--log-format=text")
	m.must(err)
	processes = append(processes, m.gateway.Process, kube, m.frontend)
	return m
}

func (m *meridio2) must(err error) {
	m.t.Helper()
	harness.Must(m.t, err)
}

func (m *meridio2) file(path string) string {
	m.t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", path))
	m.must(err)
	return string(text)
}

func (m *meridio2) wait(condition func(context.Context) error) {
	m.t.Helper()
	ctx := harness.Context(m.t, waitTimeout)
	m.must(lab.Eventually(ctx, pollInterval, func() error { return condition(ctx) }))
}

// setVIPs sets the addresses of the Gateway, as Meridio 2's controller does.
func (m *meridio2) setVIPs(vips ...string) {
	m.t.Helper()
	for i, v := range vips {
		vips[i] = fmt.Sprintf("{value: %q}", v)
	}
	m.cluster.Apply(m.t, strings.Replace(meridio2Gateway, "VIPS", strings.Join(vips, ", "), 1))
}

// addRouters creates a GatewayRouter of each family.
func (m *meridio2) addRouters(manifest string) {
	m.t.Helper()
	for name, address := range map[string]string{"router-4": lab.GatewayA4.String(), "router-6": lab.GatewayA6.String()} {
		m.cluster.Apply(m.t, strings.NewReplacer("NAME", name, "INTERFACE", lab.External, "ADDRESS", address).
			Replace(manifest))
	}
}

// ready creates or removes the readiness file of the load balancer.
func (m *meridio2) ready(is bool) {
	m.t.Helper()
	file := filepath.Join(m.readiness, "lb-ready-distribution-group-a")
	if is {
		m.must(os.WriteFile(file, nil, 0o644))
	} else {
		m.must(os.Remove(file))
	}
}

// wantReady waits until the frontend is ready.
func (m *meridio2) wantReady() {
	m.t.Helper()
	m.wait(func(ctx context.Context) error {
		return admin.WantServing(ctx, m.pod.FrontendAdmin(), "Readiness")
	})
}

func (m *meridio2) wantRoutes(routes ...string) {
	m.t.Helper()
	m.wait(func(ctx context.Context) error { return m.gateway.WantRoutes(ctx, routes...) })
}

// wantGates waits until both readiness gates have a status.
func (m *meridio2) wantGates(status corev1.ConditionStatus) {
	m.t.Helper()
	m.wait(func(ctx context.Context) error {
		pod, err := m.pods.Get(ctx, "sllb-1", metav1.GetOptions{})
		if err != nil {
			return err
		}
		n := 0
		for _, c := range pod.Status.Conditions {
			if strings.HasPrefix(string(c.Type), "meridio-2.nordix.org/") && c.Status == status {
				n++
			}
		}
		if n != 2 {
			return fmt.Errorf("readiness gates are not both %s: %+v", status, pod.Status.Conditions)
		}
		return nil
	})
}

func TestMeridio2RouterRole(t *testing.T) {
	m := newMeridio2(t)
	m.wantGates(corev1.ConditionFalse)
	m.addRouters(meridio2Router)
	// Sessions of a Gateway without VIPs: external connectivity depends neither on VIPs nor on
	// readiness.
	m.wantGates(corev1.ConditionTrue)
	m.wantReady()
	m.wantRoutes()
	// A session can restart once when its BFD session comes up; changes of VIPs restart none.
	const lost = "gateway session lost"
	before := strings.Count(m.frontend.Output(), lost)
	m.ready(true)
	m.setVIPs("20.0.0.1")
	m.wantRoutes("20.0.0.1/32")
	m.setVIPs("20.0.0.1", "2000::1")
	m.wantRoutes("20.0.0.1/32", "2000::1/128")
	m.ready(false)
	m.wantRoutes()
	m.ready(true)
	m.wantRoutes("20.0.0.1/32", "2000::1/128")
	m.setVIPs()
	m.wantRoutes()
	m.wantGates(corev1.ConditionTrue)
	m.wantReady()
	if after := strings.Count(m.frontend.Output(), lost); after != before {
		t.Errorf("%d sessions were lost after the start", after-before)
	}
	m.must(m.gateway.Process.Kill())
	m.wantGates(corev1.ConditionFalse)
}

// The gate of a static router follows its BFD session, except while the frontend keeps the session
// down because no VIP is ready.
func TestMeridio2StaticRouter(t *testing.T) {
	m := newMeridio2(t)
	m.must(m.gateway.Process.Kill())
	c := lab.GatewayA()
	c.Name, c.VIPs = "router", []netip.Prefix{netip.MustParsePrefix("20.0.0.1/32"), netip.MustParsePrefix("2000::1/128")}
	router, err := m.StartStatic(lab.KindBIRD, m.Gateway, c)
	m.must(err)
	wantBFD := func(up bool) {
		t.Helper()
		m.wait(func(ctx context.Context) error {
			sessions, err := router.BFD(ctx)
			if err != nil {
				return err
			}
			for _, peer := range c.Peers {
				if sessions[peer] != up {
					return fmt.Errorf("BFD sessions are %v, want %t", sessions, up)
				}
			}
			return nil
		})
	}
	m.setVIPs("20.0.0.1", "2000::1")
	m.addRouters(meridio2StaticRouter)
	m.wantGates(corev1.ConditionTrue)
	wantBFD(false)
	m.ready(true)
	wantBFD(true)
	m.ready(false)
	wantBFD(false)
	m.wantGates(corev1.ConditionTrue)
	for _, p := range router.Processes() {
		m.must(p.Kill())
	}
	m.ready(true)
	m.wantGates(corev1.ConditionFalse)
}
