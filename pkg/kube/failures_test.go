package kube

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/kubernetes"
)

const (
	onePod  = "trench-a.web: web-1=[10.0.0.1]"
	twoPods = onePod + " web-2=[10.0.0.2]"
	unready = `{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`
)

func TestServerStops(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	k := f.run(nil)
	f.awaitContent(onePod)
	k.awaitCurrent()
	before := f.stamp()

	f.StopServer(t)
	k.awaitStale("connection refused")
	f.wantSame(before)
	if !k.serving(Readiness) || k.serving(APIServer) {
		t.Error("without an API server kube is ready, and says that it is away")
	}

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

func TestStartWithoutServer(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	k := f.run(nil)
	f.awaitContent(onePod)
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
	if !k.serving(Readiness) {
		t.Error("with the file of an earlier run kube is ready")
	}
	f.wantSame(before)
	f.StartServer(t)
	k.awaitCurrent()
	f.wantSame(before)
}

func (i *instance) staleFile() string {
	b, _ := os.ReadFile(i.TrenchFile + staleSuffix)
	return string(b)
}

func TestSlowServer(t *testing.T) {
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

func TestHungServer(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	proxy := f.Proxy(t)
	k := f.run(proxy.Config(f.ServiceAccount(t, "trench-a", "kube")))
	f.awaitContent(onePod)
	k.awaitCurrent()
	before := f.stamp()

	proxy.Delay(time.Hour)
	k.awaitStale("API server")
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.wantSame(before)
	// What hangs are the old connections: kube uses others.
	proxy.Delay(0)
	f.awaitContent(twoPods)
	k.awaitCurrent()
}

func TestCompaction(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	proxy := f.Proxy(t)
	k := f.run(proxy.Config(f.ServiceAccount(t, "trench-a", "kube")))
	f.awaitContent(onePod)

	// The server that comes back has nothing of before in its watch cache.
	proxy.Cut()
	k.awaitStale("EOF")
	f.addPod("trench-a", "web-2", "10.0.0.2")
	f.remove(podResource, "web-1", 0)
	f.StopServer(t)
	f.Compact(t)
	f.StartServer(t)
	proxy.Restore()
	f.awaitContent("trench-a.web: web-2=[10.0.0.2]")
	k.awaitCurrent()
}

func TestTokenExpires(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	config := f.ServiceAccount(t, "trench-a", "kube")
	good, err := os.ReadFile(config.BearerTokenFile)
	if err != nil {
		t.Fatal(err)
	}
	// A token that the server refuses, as it does an expired one.
	write := func(token []byte) {
		if err := os.WriteFile(config.BearerTokenFile, token, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write([]byte("expired"))
	k := f.run(config)
	k.awaitStale("Unauthorized")
	if k.serving(Readiness) {
		t.Error("kube is ready without a trench file")
	}
	write(good)
	f.awaitContent(onePod)
	k.awaitCurrent()
}

func TestInvalidTrench(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	k := f.run(nil)
	f.awaitContent(onePod)
	k.awaitCurrent()
	before := f.stamp()

	f.patch(trenchResource, "trench-a", `{"spec":{"attractor":{"vips":["twenty"]}}}`)
	await.True(t, "Trench is refused", func() bool { return !k.serving(Trench) })
	f.remove(podResource, "web-1", 0)
	await.True(t, "Pod is gone", func() bool { return len(k.evaluated.Load().Pods) == 0 })
	f.wantSame(before)
	if !k.serving(Readiness) {
		t.Error("with an invalid Trench kube is ready, as the previous file is in force")
	}

	f.patch(trenchResource, "trench-a", `{"spec":{"attractor":{"vips":["20.0.0.1/32"]}}}`)
	f.awaitContent("trench-a.web:")
}

func TestTrenchDeleted(t *testing.T) {
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

func TestServiceDeleted(t *testing.T) {
	f := newFixture(t)
	f.addPod("trench-a", "web-1", "10.0.0.1")
	f.run(nil)
	f.awaitContent(onePod)
	f.remove(serviceResource, "web")
	f.awaitContent("")
}

var _ = health.Liveness
var _ = kubernetes.Start
