package kube

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/kubernetes"
)

const (
	onePod  = "trench-a.web: web-1=[10.0.0.1]"
	twoPods = onePod + " web-2=[10.0.0.2]"
)

// withPod runs kube until the trench file has one pod.
func withPod(t *testing.T) (*fixture, *instance) {
	t.Helper()
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	k := f.run(nil)
	f.awaitContent(onePod)
	return f, k
}

// behindProxy is withPod with a proxy in front of the API server, and waits for the watches.
func behindProxy(t *testing.T) (*fixture, *kubernetes.Proxy, *instance) {
	t.Helper()
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	proxy := f.Proxy(t)
	k := f.run(proxy.Config(f.ServiceAccount(t, "trench-a", "kube")))
	f.awaitContent(onePod)
	k.awaitCurrent()
	return f, proxy, k
}

func TestAPIServerStops(t *testing.T) {
	f, k := withPod(t)
	k.awaitCurrent()
	before := f.stamp()

	f.StopServer(t)
	k.awaitStale("connection refused")
	f.wantSame(before)
	await.True(t, "kube is ready, and says that the API server is away", func() bool {
		return k.serving(Readiness) && !k.serving(APIServer)
	})

	f.StartServer(t)
	k.awaitCurrent()
	f.wantSame(before)
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.awaitContent(twoPods)
	f.remove(podResource, "web-2", 0)
	f.awaitContent(onePod)
}

// serving returns the state of a health service.
func (i *instance) serving(name string) bool {
	for _, c := range i.health.Conditions() {
		if c.Name == name {
			return c.Serving
		}
	}
	i.t.Fatalf("there is no health service %s", name)
	return false
}

func TestAPIServerAwayAtStart(t *testing.T) {
	f, k := withPod(t)
	before := f.stamp()
	config := f.ServiceAccount(t, "trench-a", "kube")
	f.StopServer(t)
	k.awaitStale("connection refused")
	first, _, _ := strings.Cut(k.staleFile(), " ")
	k.stop()
	f.wantSame(before)

	k = f.run(config)
	k.awaitStale("connection refused")
	if since, _, _ := strings.Cut(k.staleFile(), " "); since != first {
		t.Errorf("stale since %s for the second kube, since %s for the first", since, first)
	}
	await.True(t, "with the file of an earlier run kube is ready", func() bool { return k.serving(Readiness) })
	f.wantSame(before)
	f.StartServer(t)
	k.awaitCurrent()
	f.wantSame(before)
}

func (i *instance) staleFile() string {
	b, _ := os.ReadFile(i.TrenchFile + trench.StaleSuffix)
	return string(b)
}

func TestAPIServerSlow(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	proxy := f.Proxy(t)
	proxy.Delay(300 * time.Millisecond)
	k := f.run(proxy.Config(f.ServiceAccount(t, "trench-a", "kube")))
	f.awaitContent(onePod)
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.awaitContent(twoPods)
	k.awaitCurrent()
}

func TestAPIServerHangs(t *testing.T) {
	f, proxy, k := behindProxy(t)
	before := f.stamp()

	proxy.Delay(time.Hour)
	k.awaitStale("API server")
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.wantSame(before)
	// Only the old connections hang: kube opens new ones.
	proxy.Delay(0)
	f.awaitContent(twoPods)
	k.awaitCurrent()
}

func TestAPIServerCompacts(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	proxy := f.ProxyOn(t, l)
	config := proxy.Config(f.ServiceAccount(t, "trench-a", "kube"))
	gone := &scanner{text: []byte("Expired")} // the reason in a 410
	config.Wrap(gone.wrap)
	k := f.run(config)
	f.awaitContent(onePod)

	// client-go does not continue a watch without an event, but starts a new one.
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.awaitContent(twoPods)
	// Refuse connections, so that kube tries to continue its watches.
	l.Close()
	proxy.Cut()
	k.awaitStale("connection refused")
	f.addPod("trench-a", "web-3", "10.0.0.3")
	f.remove(podResource, "web-1", 0)
	f.Compact(t)
	if l, err = net.Listen("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	f.ProxyOn(t, l)
	f.awaitContent("trench-a.web: web-2=[10.0.0.2] web-3=[10.0.0.3]")
	k.awaitCurrent()
	if gone.found.Load() == 0 {
		t.Error("the API server has continued every watch")
	}
}

// scanner counts the reads of responses that contain a text.
type scanner struct {
	text  []byte
	found atomic.Int64
}

func (s *scanner) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(r)
		if err == nil {
			response.Body = &scanned{response.Body, s}
		}
		return response, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

type scanned struct {
	io.ReadCloser
	scanner *scanner
}

func (s *scanned) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	if bytes.Contains(p[:n], s.scanner.text) {
		s.scanner.found.Add(1)
	}
	return n, err
}

func TestAPIServerClosesConnections(t *testing.T) {
	f, proxy, k := behindProxy(t)
	before := f.stamp()
	proxy.Cut()
	k.awaitStale("closed")
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.remove(podResource, "web-1", 0)
	f.wantSame(before)
	proxy.Restore()
	f.awaitContent("trench-a.web: web-2=[10.0.0.2]")
	k.awaitCurrent()
}

func TestAPIServerRefusesOldToken(t *testing.T) {
	f, proxy, k := behindProxy(t)
	before := f.stamp()

	// The API server refuses the token of a deleted service account like an expired one.
	f.remove(accountResource, "kube")
	proxy.Cut()
	proxy.Restore()
	k.awaitStale("Unauthorized")
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.wantSame(before)

	f.ServiceAccount(t, "trench-a", "kube") // replaces the token in the same file
	f.awaitContent(twoPods)
	k.awaitCurrent()
}

func TestAPIServerRefusesFirstToken(t *testing.T) {
	f := newFixture(t)
	config := f.ServiceAccount(t, "trench-a", "kube")
	harness.Must(t, os.WriteFile(config.BearerTokenFile, []byte("expired"), 0o600))
	k := f.run(config)
	k.awaitStale("Unauthorized")
	if k.serving(Readiness) {
		t.Error("kube is ready without a trench file")
	}
	f.ServiceAccount(t, "trench-a", "kube")
	f.awaitContent("trench-a.web:")
	k.awaitCurrent()
}

func TestAPIServerInvalidTrench(t *testing.T) {
	f, k := withPod(t)
	k.awaitCurrent()
	before := f.stamp()

	f.patch(trenchResource, "trench-a", `{"spec":{"attractor":{"vips":["twenty"]}}}`)
	await.True(t, "Trench is refused", func() bool { return !k.serving(Trench) })
	f.remove(podResource, "web-1", 0)
	await.True(t, "Pod is gone", func() bool { return len(k.evaluated.Load().Objects.Pods) == 0 })
	f.wantSame(before)
	if !k.serving(Readiness) {
		t.Error("with an invalid Trench kube is ready, as the previous file is in force")
	}

	f.patch(trenchResource, "trench-a", `{"spec":{"attractor":{"vips":["20.0.0.1/32"]}}}`)
	f.awaitContent("trench-a.web:")
}

func TestAPIServerTrenchDeleted(t *testing.T) {
	f := newFixture(t)
	k := f.run(nil)
	f.awaitContent("trench-a.web:")
	before := f.stamp()
	f.remove(trenchResource, "trench-a")
	k.awaitStale("Trench trench-a/trench-a: does not exist")
	f.wantSame(before)
	f.Apply(t, trenchA)
	k.awaitCurrent()
	f.addPod("trench-a", "web-1", "10.0.0.1")
	f.awaitContent(onePod)
}

func TestAPIServerServiceDeleted(t *testing.T) {
	f, _ := withPod(t)
	f.remove(serviceResource, "web")
	f.awaitContent("")
}
