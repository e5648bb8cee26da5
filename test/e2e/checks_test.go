package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// listen listens at an address of the targets' network.
func (f *fixture) listen(a netip.Addr, port uint16) net.Listener {
	f.t.Helper()
	l, err := f.Backend.Listen("tcp", netip.AddrPortFrom(a, port).String())
	f.must(err)
	return l
}

// HTTP checks (status, body) and gRPC checks decide about VIPs in both families: a target that
// listens and reports itself unhealthy is not ready.
func TestApplicationHealthChecks(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	trench := strings.Replace(usualTrench(), fmt.Sprintf("check: {tcp: {port: %d}", checkPort),
		`check: {http: {port: 8080, path: /healthz, status: 200, body: "^fine"}`, 1)
	trench = strings.Replace(
		trench, fmt.Sprintf("check: {tcp: {port: %d}", checkPort), "check: {grpc: {port: 9090, service: app}", 1,
	)
	f.must(f.pod.WriteTrench(trench))

	var answer atomic.Value
	answer.Store("fine")
	web := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		text := answer.Load().(string)
		if text == "503" || r.URL.Path != "/healthz" {
			rw.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprint(rw, text)
	})}
	app := health.NewServer()
	app.SetServingStatus("app", healthv1.HealthCheckResponse_SERVING)
	server := grpc.NewServer()
	healthv1.RegisterHealthServer(server, app)
	var wg sync.WaitGroup
	t.Cleanup(func() { server.Stop(); f.must(web.Close()); wg.Wait() })
	for _, a := range []netip.Addr{lab.Target1v4, lab.Target1v6} {
		l := f.listen(a, 8080)
		wg.Go(func() {
			if err := web.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
		})
	}
	for _, a := range []netip.Addr{lab.Target2v4, lab.Target2v6} {
		l := f.listen(a, 9090)
		wg.Go(func() {
			harness.Check(t, server.Serve(l))
		})
	}

	f.startPod()
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	answer.Store("503")
	f.wantRoutes(vipB4, vipB6)
	f.wantStatus("status 503, wanted 200")
	answer.Store("not at all fine")
	f.wantStatus("body")
	app.SetServingStatus("app", healthv1.HealthCheckResponse_NOT_SERVING)
	f.wantRoutes()
	f.wantStatus("NOT_SERVING")
	answer.Store("fine")
	app.SetServingStatus("app", healthv1.HealthCheckResponse_SERVING)
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
}
