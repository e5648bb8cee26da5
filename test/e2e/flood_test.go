package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// Addresses of the plaintext listeners on the targets' network, as on a pod's address.
const (
	podAddress      = "172.16.0.1"
	floodedLB       = podAddress + ":7781"
	floodedFrontend = podAddress + ":7780"
	floodedMetrics  = podAddress + ":2223"
	floodedRegistry = podAddress + ":7790"
)

// exposed are flags that bind the listeners to the pod's address.
var exposed = []string{"--health-address=" + podAddress, "--metrics-address=" + podAddress}

// floodedLBArgs are the arguments of an lb with every listener.
var floodedLBArgs = append(slices.Concat(exposed, registry), "--registry-address="+floodedRegistry)

// flood holds connections from one namespace until the test ends.
type flood struct {
	*fixture
	from *lab.NetNS
}

// connect opens n connections and returns them.
func (clients *flood) connect(addr string, n int) []net.Conn {
	clients.t.Helper()
	conns := make([]net.Conn, 0, n)
	clients.must(clients.from.Do(func() error {
		for range n {
			ctx, cancel := context.WithTimeout(clients.t.Context(), waitTimeout)
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
			cancel()
			if err != nil {
				return err
			}
			conns = append(conns, conn)
		}
		return nil
	}))
	clients.t.Cleanup(func() {
		for _, c := range conns {
			c.Close()
		}
	})
	return conns
}

// streams opens n streams of a method on a connection and never reads. It ends without an error
// when the server closes the connection.
func streams(conn net.Conn, method string, body []byte, n int) {
	if _, err := conn.Write([]byte(http2.ClientPreface)); err != nil {
		return
	}
	framer := http2.NewFramer(conn, nil)
	if framer.WriteSettings() != nil {
		return
	}
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for i := range n {
		block.Reset()
		for _, field := range [][2]string{
			{":method", "POST"},
			{":scheme", "http"},
			{":path", method},
			{":authority", "x"},
			{"content-type", "application/grpc"},
			{"te", "trailers"},
		} {
			if encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}) != nil {
				return
			}
		}
		id := uint32(2*i + 1)
		if framer.WriteHeaders(http2.HeadersFrameParam{
			StreamID: id, BlockFragment: block.Bytes(),
			EndHeaders: true,
		}) != nil {
			return
		}
		if body != nil && framer.WriteData(id, true, body) != nil {
			return
		}
	}
}

const (
	reflectionMethod = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	watchMethod      = "/grpc.health.v1.Health/Watch"
)

// emptyMessage is a gRPC message of no bytes.
var emptyMessage = make([]byte, 5)

// memory returns a line of /proc/PID/status in bytes.
func (f *fixture) memory(p *lab.Process, line string) int {
	f.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	f.must(err)
	m := regexp.MustCompile(`(?m)^` + line + `:\s+(\d+) kB$`).FindSubmatch(status)
	if m == nil {
		f.t.Fatalf("no %s in the status of %s", line, p.Name)
	}
	kib, err := strconv.Atoi(string(m[1]))
	f.must(err)
	return kib << 10
}

// probe checks Liveness like the kubelet: one connection per check, with a timeout.
func (f *fixture) probe(addr string) error {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(
			func(ctx context.Context, addr string) (net.Conn, error) { return f.dialPod(ctx, "tcp", addr) }))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx := harness.Context(f.t, waitTimeout)
	answer, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: "Liveness"})
	if err == nil && answer.GetStatus() != healthServing {
		err = fmt.Errorf("Liveness is %s", answer.GetStatus())
	}
	return err
}

// Another pod floods the health ports with streams and idle connections; memory stays bounded,
// probes and flips continue.
func TestHealthPortFlood(t *testing.T) {
	const (
		connections, each = 140, 150 // 21 000 streams
		idle              = 2_000
		growth            = 64 << 20
	)
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.WriteTrench(usualTrench()))
	f.must(f.pod.StartLB(floodedLBArgs...))
	f.must(f.pod.StartFrontend(exposed...))
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()
	processes := map[string]*lab.Process{floodedLB: f.pod.LB, floodedFrontend: f.pod.Frontend}
	before := map[string]int{}
	clients := &flood{f, f.Backend}
	began := time.Now()
	for addr, p := range processes {
		f.must(f.probe(addr))
		before[addr] = f.memory(p, "VmRSS")
		clients.connect(addr, idle)
		for _, conn := range clients.connect(addr, 200) {
			streams(conn, watchMethod, emptyMessage, 0) // a preface, and nothing more
		}
		for i, conn := range clients.connect(addr, connections) {
			if i%2 == 0 {
				streams(conn, reflectionMethod, nil, each)
			} else {
				streams(conn, watchMethod, emptyMessage, each)
			}
		}
	}
	clients.connect(floodedMetrics, idle)
	clients.connect(floodedRegistry, 2*idle)
	// A second flood, from the address of the probes.
	for addr := range processes {
		(&flood{f, f.Pod}).connect(addr, 300)
	}
	t.Logf("the flood took %v", time.Since(began).Round(time.Millisecond))

	for range 5 {
		for addr, p := range processes {
			if err := f.probe(addr); err != nil {
				t.Errorf("a probe of %s during the flood: %v", p.Name, err)
			}
		}
	}
	flipped := time.Now()
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	t.Logf("VIPs rose and fell within %v", time.Since(flipped).Round(time.Millisecond))
	f.wantNoUpdates(mark, vipA4, vipA6)
	for addr, p := range processes {
		if grown := f.memory(p, "VmHWM") - before[addr]; grown > growth {
			t.Errorf("the flood takes %d MiB of %s, want at most %d", grown>>20, p.Name, growth>>20)
		} else {
			t.Logf("%s: %d MiB before, at most %d MiB more", p.Name, before[addr]>>20, grown>>20)
		}
	}
	f.wantRunning(f.pod.LB, f.pod.Frontend)
}

// With few file descriptors, idle connections must not delay checks: listeners reserve descriptors
// for the data path.
func TestIdleConnectionsLeaveDescriptors(t *testing.T) {
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.WriteTrench(usualTrench()))
	args := f.pod.LBArgs(floodedLBArgs...)
	lb, err := f.Start(f.Pod, "lb", append([]string{"/bin/sh", "-c", `ulimit -n 256; exec "$@"`, "lb"}, args...)...)
	f.must(err)
	f.pod.LB = lb
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()
	clients := &flood{f, f.Backend}
	for _, addr := range []string{floodedLB, floodedMetrics, floodedRegistry} {
		clients.connect(addr, 400)
	}
	crowd := &crowd{fixture: f}
	for range 400 {
		crowd.connect("unix", f.pod.Socket())
	}
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	f.wantNoUpdates(mark, vipA4, vipA6)

	// Other clients are served on every listener.
	if _, err := f.ask(f.operator()); err != nil {
		t.Errorf("the operator during the flood: %v", err)
	}
	f.must(f.probe(floodedLB))
	if page := f.get(floodedMetrics, "/metrics"); !strings.Contains(page, "vipgate_lb_") {
		t.Errorf("metrics during the flood: %.100q", page)
	}
	id, err := f.Start(f.Pod, "registration", binaries+"/lb", "target", "add", "app-1", "--stream=stream-a",
		"--registry="+floodedRegistry, "--lb-id="+lab.LBID,
		"--identity=dev", "--dev-authority-dir="+f.pod.Authority(), "--spiffe-id="+lab.AppID, "--ip="+lab.Target2v4.String())
	f.must(err)
	f.waitLog(id, "registered")
}

// kubectl port-forward connects to 127.0.0.1 in the pod.
func TestLoopbackListenersForPortForward(t *testing.T) {
	t.Parallel()
	for _, host := range []string{podAddress, "fd00:16::1", "0.0.0.0", "::"} {
		t.Run(host, func(t *testing.T) {
			f := newFixture(t)
			hosts := []string{"--health-address=" + host, "--metrics-address=" + host}
			f.must(f.pod.StartLB(hosts...))
			f.must(f.pod.StartFrontend(hosts...))
			for _, addr := range []string{lab.LBHealth, lab.FrontendHealth} {
				f.wantHealth(addr, "Liveness", healthServing)
			}
			for addr, prefix := range map[string]string{
				lab.LBMetrics:       "vipgate_lb_",
				lab.FrontendMetrics: "vipgate_frontend_",
			} {
				if page := f.get(addr, "/metrics"); !strings.Contains(page, prefix) {
					t.Errorf("%s: %.100q", addr, page)
				}
			}
			if netip.MustParseAddr(host).IsUnspecified() {
				return
			}
			for _, port := range []string{"7780", "7781"} {
				f.must(f.probe(net.JoinHostPort(host, port)))
			}
			external := net.JoinHostPort(lab.PodExternal4.String(), "7781")
			if conn, err := f.dialPod(t.Context(), "tcp", external); err == nil {
				conn.Close()
				t.Errorf("%s is reachable", external)
			}
		})
	}
}
