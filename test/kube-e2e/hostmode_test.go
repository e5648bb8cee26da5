package kubee2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
	"github.com/vipgate/vipgate/test/lab"
)

const (
	controlPlane = 3 // nodes
	apiPort      = 6443
	clients      = 4
)

// hostTrench is the trench file of every node. A hung API server is detected after 5 s: busy ones,
// of which several start on one machine, answer within that time.
const hostTrench = `trench: kubernetes
attractor:
  name: api
  vips: [%[1]s]
  gateways: [{name: gateway-a4, address: %[2]s, holdTime: 12s}]
streams:
  - name: kube-apiserver
    vips: [%[1]s]
    check:
      http: {port: %[3]d, path: /readyz, status: 200, tls: {caFile: %[4]s, certFile: %[5]s, keyFile: %[6]s}}
      interval: 500ms
      timeout: 500ms
      fastInterval: 10ms
      fall: 10
    targets: [{name: self, ips: [127.0.0.1]}]
`

// controlPlaneFixture is a control plane of three nodes, each with an API server, an lb and a
// frontend, and a gateway with clients.
type controlPlaneFixture struct {
	*lab.Topology
	t       *testing.T
	cluster *kubernetes.Cluster
	nodes   []*controlPlaneNode
	config  *rest.Config // of clients
	load    counters
}

type controlPlaneNode struct {
	*lab.Pod
	f      *controlPlaneFixture
	number int
	server *lab.Process
}

// counters count requests. An attempt that fails is one connection; client-go repeats a GET whose
// connection was reset before the answer.
type counters struct{ requests, failed, resets, cut atomic.Int64 }

// TestVIPOfAPIServer has the real API servers, and the VIP that clients and kubelets use for them.
func TestVIPOfAPIServer(t *testing.T) {
	f := newControlPlane(t)
	// The VIP is announced by nodes whose sessions were up before any API server answered.
	for _, node := range f.nodes {
		node.start()
	}
	f.wait(f.sessions)
	harness.Must(t, f.via())
	for _, node := range f.nodes {
		node.startServer()
	}
	for _, node := range f.nodes {
		node.waitReady()
	}
	f.measure("announced after every API server answered", 1, 2, 3)
	f.cluster.StopServer(t)
	stop := f.clients()
	defer stop()

	f.unplanned("killed", 1, (*controlPlaneNode).kill, func(node *controlPlaneNode) { node.startServer() })
	f.unplanned("hung", 2, func(node *controlPlaneNode) { node.signal(node.server, unix.SIGSTOP) },
		func(node *controlPlaneNode) { node.signal(node.server, unix.SIGCONT) })
	f.unplanned("isolated", 3, func(node *controlPlaneNode) { node.link("down") },
		func(node *controlPlaneNode) { node.link("up") })
	f.unplanned("hung lb", 1, func(node *controlPlaneNode) { node.signal(node.LB, unix.SIGSTOP) },
		func(node *controlPlaneNode) { node.signal(node.LB, unix.SIGCONT) })

	// A rolling restart: first lb, which waits for the withdrawal, then the API server.
	before, resets, cut := f.load.failed.Load(), f.load.resets.Load(), f.load.cut.Load()
	requests := f.load.requests.Load()
	for _, node := range f.nodes {
		node.end(node.LB)
		node.wantAddress(false)
		node.end(node.server)
		node.end(node.Frontend)
		node.startServer()
		node.waitReady()
		node.start()
		f.want(1, 2, 3)
	}
	requests = f.load.requests.Load() - requests
	cut = f.load.cut.Load() - cut
	t.Logf("rolling restart: %d requests, %d answers cut, %d connections failed and repeated by client-go", requests, cut,
		f.load.resets.Load()-resets)
	if failed := f.load.failed.Load() - before; failed > 0 || cut > clients*controlPlane || requests < 100 {
		t.Errorf("%d of %d requests failed in the rolling restart, %d answers were cut", failed, requests, cut)
	}
}

func newControlPlane(t *testing.T) *controlPlaneFixture {
	t.Helper()
	t.Parallel()
	f := &controlPlaneFixture{t: t, cluster: kubernetes.Start(t)}
	topology, err := lab.NewTopology(lab.TopologyConfig{
		Pods: controlPlane, Targets: 1, VIPs: []netip.Addr{netip.MustParseAddr(vip4)}, Binaries: binaries,
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Check(t, topology.Close()) })
	f.Topology = topology
	t.Cleanup(func() {
		for _, node := range f.nodes {
			for _, p := range []*lab.Process{node.LB, node.Frontend, node.server} {
				if t.Failed() && p != nil {
					t.Logf("== last lines of %s of node %d\n%s", p.Name, node.number, p.Tail(20))
				}
			}
		}
	})
	harness.Must(t, f.StartGateways(nil))
	for i, pod := range f.Pods {
		node := &controlPlaneNode{Pod: pod, f: f, number: i + 1}
		f.nodes = append(f.nodes, node)
		ca, cert, key := f.cluster.ClientFiles(t, pod.Dir, "vipgate")
		harness.Must(t, pod.WriteTrench(fmt.Sprintf(hostTrench, route4, lab.GatewayA4, apiPort, ca, cert, key)))
		// Clients on a node reach the VIP of other nodes like every other address.
		harness.Must(t, pod.NS.IP("route", "add", "default", "via", lab.GatewayA4.String()))
	}
	f.config = f.cluster.Admin()
	f.config.Host = fmt.Sprintf("https://%s:%d", vip4, apiPort)
	// Far above the time that an API server takes on a busy machine: a failed request was not answered.
	f.config.Timeout = 30 * time.Second
	return f
}

// start starts lb and frontend, which know each other by their users.
func (node *controlPlaneNode) start() {
	t := node.f.t
	t.Helper()
	run := func(program string, args ...string) *lab.Process {
		t.Helper()
		p, err := lab.StartProcess(node.NS, node.Dir, program, append([]string{
			filepath.Join(binaries, program), "run", "--trench-file=" + node.TrenchFile(), "--identity=peer-credentials",
			"--log-format=text",
		}, args...)...)
		harness.Must(t, err)
		t.Cleanup(func() { harness.Check(t, p.Kill()) })
		return p
	}
	node.LB = run("lb", "--socket=unix://"+node.Socket(), "--admin-socket=unix://"+node.LBAdmin(),
		"--state-dir="+node.StateDir(), "--vip-interface=lo", "--lease=10s")
	node.Frontend = run("frontend", "--lb-socket=unix://"+node.Socket(), "--admin-socket=unix://"+node.FrontendAdmin(),
		"--external-interface="+lab.External, "--bird-dir="+node.BirdDir(), "--bird-socket="+node.BirdSocket())
}

// startServer starts the node's API server.
func (node *controlPlaneNode) startServer() {
	t := node.f.t
	t.Helper()
	args := node.f.cluster.MemberArgs(t, node.Dir, apiPort, node.f.VIPs...)
	p, err := lab.StartProcess(node.NS, node.Dir, "kube-apiserver", args...)
	harness.Must(t, err)
	node.server = p
	t.Cleanup(func() { harness.Check(t, p.Kill()) })
}

// waitReady waits until the API server answers on loopback.
func (node *controlPlaneNode) waitReady() {
	node.f.t.Helper()
	node.f.wait(func() error { return node.get("127.0.0.1") })
}

// get sends a request to the node's own address, or to the VIP, from the node.
func (node *controlPlaneNode) get(host string) error {
	config := node.f.cluster.Admin()
	config.Host, config.Timeout = fmt.Sprintf("https://%s:%d", host, apiPort), time.Second
	var load counters
	return list(node.f.t.Context(), config, node.NS, &load)
}

// list sends a request of client-go over new connections.
func list(ctx context.Context, config *rest.Config, ns *lab.NetNS, load *counters) error {
	client, err := namespaces(ctx, config, ns, load)
	if err != nil {
		return err
	}
	_, err = client.List(ctx, metav1.ListOptions{})
	return err
}

// namespaces returns a client whose connections begin in a network namespace and carry one request.
// A transport continues to dial after the end of a request, but not beyond ctx.
func namespaces(ctx context.Context, config *rest.Config, ns *lab.NetNS, load *counters,
) (typedcorev1.NamespaceInterface, error) {
	config = rest.CopyConfig(config)
	config.NextProtos = []string{"http/1.1"}
	config.Dial = func(dialing context.Context, network, address string) (conn net.Conn, err error) {
		dialing, cancel := context.WithCancel(dialing)
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		err = ns.Do(func() error {
			conn, err = new(net.Dialer).DialContext(dialing, network, address)
			return err
		})
		return conn, err
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			r = r.Clone(r.Context())
			r.Close = true
			response, err := next.RoundTrip(r)
			if err != nil {
				load.resets.Add(1)
			}
			return response, err
		})
	})
	client, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	return client.Namespaces(), nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// clients sends requests to the VIP from the gateway until stop is called.
func (f *controlPlaneFixture) clients() (stop func()) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for range clients {
		client, err := namespaces(ctx, f.config, f.Gateway, &f.load)
		harness.Must(f.t, err)
		running.Go(func() {
			every := time.NewTicker(100 * time.Millisecond)
			defer every.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-every.C:
				}
				_, err := client.List(ctx, metav1.ListOptions{})
				if ctx.Err() != nil {
					return
				}
				f.load.requests.Add(1)
				// A gateway that gets a path moves flows to it: client-go does not repeat a GET whose answer began.
				if errors.Is(err, unix.ECONNRESET) && strings.Contains(err.Error(), "reading response body") {
					f.load.cut.Add(1)
				} else if err != nil {
					f.load.failed.Add(1)
					f.t.Logf("%s request failed: %v", time.Now().Format("15:04:05.000"), err)
				}
			}
		})
	}
	return func() { cancel(); running.Wait() }
}

// unplanned breaks a node, and repairs it. In between the VIP leaves the node, and processes on
// that node reach another one.
func (f *controlPlaneFixture) unplanned(what string, number int, harm, repair func(*controlPlaneNode)) {
	f.t.Helper()
	node := f.nodes[number-1]
	failed := f.load.failed.Load()
	harm(node)
	rest := slices.DeleteFunc([]int{1, 2, 3}, func(n int) bool { return n == number })
	f.measure(what, rest...)
	if what == "killed" || what == "hung" {
		node.wantAddress(false)
		f.wait(func() error { return node.get(vip4) })
	}
	// A request that was on its way may fail for the time limit of the client.
	f.t.Logf("%s: %d requests failed", what, f.load.failed.Load()-failed)
	repair(node)
	f.want(1, 2, 3)
	node.wantAddress(true)
	f.wait(func() error { return node.get(vip4) })
}

// measure waits until the gateway sends requests to exactly these nodes, and logs the time.
func (f *controlPlaneFixture) measure(what string, nodes ...int) {
	f.t.Helper()
	begin := time.Now()
	f.want(nodes...)
	f.t.Logf("%s: the gateway uses the nodes %v after %v", what, nodes, time.Since(begin).Round(time.Millisecond))
}

func (f *controlPlaneFixture) want(nodes ...int) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), waitTimeout)
	defer cancel()
	harness.Must(f.t, f.WantVia(ctx, nodes...))
}

// via returns an error if the gateway has a route to the VIP.
func (f *controlPlaneFixture) via() error {
	nodes, err := f.Via(f.VIPs[0])
	if err == nil && len(nodes) > 0 {
		err = fmt.Errorf("the gateway sends requests to the nodes %v, and none answers", nodes)
	}
	return err
}

// sessions returns an error unless the gateway has a BGP session with each node.
func (f *controlPlaneFixture) sessions() error {
	out, err := f.Routers[0].(*lab.Gateway).Command(f.t.Context(), "show protocols")
	if n := strings.Count(out, "Established"); err == nil && n < controlPlane {
		err = fmt.Errorf("%d sessions are up: %s", n, out)
	}
	return err
}

// wait waits until condition returns nil.
func (f *controlPlaneFixture) wait(condition func() error) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), waitTimeout)
	defer cancel()
	harness.Must(f.t, lab.Eventually(ctx, 20*time.Millisecond, condition))
}

// wantAddress waits until the VIP is an address of the node, or none.
func (node *controlPlaneNode) wantAddress(want bool) {
	node.f.t.Helper()
	node.f.wait(func() error {
		out, err := node.NS.Run(node.f.t.Context(), "ip", "-o", "address", "show", "dev", "lo")
		if err == nil && strings.Contains(out, " "+route4+" ") != want {
			err = errors.New(out)
		}
		return err
	})
}

func (node *controlPlaneNode) signal(p *lab.Process, signal unix.Signal) {
	node.f.t.Helper()
	harness.Must(node.f.t, p.Signal(signal))
}

func (node *controlPlaneNode) kill() { harness.Must(node.f.t, node.server.Kill()) }

// end ends a process as an init system does.
func (node *controlPlaneNode) end(p *lab.Process) {
	node.f.t.Helper()
	ctx, cancel := context.WithTimeout(node.f.t.Context(), waitTimeout)
	defer cancel()
	node.signal(p, unix.SIGTERM)
	_, err := p.Wait(ctx)
	harness.Must(node.f.t, err)
}

// link sets the state of the port of the node's link at the gateway.
func (node *controlPlaneNode) link(state string) {
	node.f.t.Helper()
	harness.Must(node.f.t, node.f.Gateway.IP("link", "set", fmt.Sprintf("pod%d", node.number), state))
}
