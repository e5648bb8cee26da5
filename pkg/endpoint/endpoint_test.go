package endpoint

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpchealth "google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/metrics"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func registerHealth(r grpc.ServiceRegistrar) {
	healthv1.RegisterHealthServer(r, grpchealth.NewServer())
}

func newAdmin(t *testing.T) (path string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	path = filepath.Join(dir, "admin.sock")
	e, err := NewAdmin(t.Context(), path, quiet, metrics.NewLB("test"), nil, registerHealth)
	harness.Must(t, err)
	harness.Run(t, e.Run)
	return path
}

func check(t *testing.T, target string) error {
	t.Helper()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	defer conn.Close()
	ctx := harness.Context(t, 10*time.Second)
	_, err = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	return err
}

func TestAdminSocketGRPCAndPprof(t *testing.T) {
	path := newAdmin(t)
	harness.Must(t, check(t, "unix:"+path))
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
		DisableKeepAlives: true,
	}}
	r, err := client.Get("http://admin/debug/pprof/goroutine?debug=1")
	harness.Must(t, err)
	defer r.Body.Close()
	if body, err := io.ReadAll(r.Body); err != nil || !bytes.Contains(body, []byte("goroutine profile")) {
		t.Fatalf("got %q, %v", body, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v; want 0600", info.Mode(), err)
	}
}

func TestCallsAreCounted(t *testing.T) {
	calls := metrics.NewLB("test")
	dir, err := os.MkdirTemp("", "vg")
	harness.Must(t, err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "admin.sock")
	admin, err := NewAdmin(t.Context(), path, quiet, calls, nil, registerHealth)
	harness.Must(t, err)
	harness.Run(t, admin.Run)
	plain, err := NewPlain(t.Context(), "health", "127.0.0.1:0", nil, calls, registerHealth)
	harness.Must(t, err)
	harness.Run(t, plain.Run)
	count := func(code string) (n float64) {
		families, err := calls.Registry().Gather()
		harness.Must(t, err)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				labels := map[string]string{}
				for _, l := range m.GetLabel() {
					labels[l.GetName()] = l.GetValue()
				}
				if f.GetName() == metrics.CallsHandled.Name && labels["grpc_method"] == "Check" &&
					labels["grpc_code"] == code {
					n += m.GetCounter().GetValue()
				}
			}
		}
		return n
	}
	if n := count("OK"); n != 0 {
		t.Fatalf("%v calls before the first", n)
	}
	for _, target := range []string{"unix:" + path, plain.Addr().String()} {
		harness.Must(t, check(t, target))
	}
	if n := count("OK"); n != 2 {
		t.Errorf("%v calls were counted, want 2", n)
	}
	if n := count("NotFound"); n != 0 {
		t.Errorf("%v calls failed", n)
	}
}

func TestRefusedLocalAddress(t *testing.T) {
	refused := netip.MustParseAddr("127.0.0.2")
	e, err := NewPlain(t.Context(), "health", "0.0.0.0:0", func(a netip.Addr) bool { return a == refused },
		metrics.NewLB("test"), registerHealth)
	harness.Must(t, err)
	harness.Run(t, e.Run)
	port := e.Addr().(*net.TCPAddr).AddrPort().Port()
	for _, address := range []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"} {
		at := netip.MustParseAddr(address)
		if err := check(t, netip.AddrPortFrom(at, port).String()); (err == nil) != (at != refused) {
			t.Errorf("%s: %v", at, err)
		}
	}
}

func TestAdminSocketGarbageAndSilence(t *testing.T) {
	path := newAdmin(t)
	for _, garbage := range []string{
		"\x00\xff\x00\xff garbage\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff", "GE", "",
	} {
		conn, err := net.Dial("unix", path)
		harness.Must(t, err)
		defer conn.Close()
		if _, err := io.Copy(conn, strings.NewReader(garbage)); err != nil {
			t.Fatal(err)
		}
	}
	harness.Must(t, check(t, "unix:"+path))
}

func TestPlainEndpoint(t *testing.T) {
	e, err := NewPlain(t.Context(), "health", "127.0.0.1:0", nil, metrics.NewLB("test"), registerHealth)
	harness.Must(t, err)
	stop := harness.Run(t, e.Run)
	harness.Must(t, check(t, e.Addr().String()))
	_, err = NewPlain(t.Context(), "health", e.Addr().String(), nil, metrics.NewLB("test"), registerHealth)
	if err == nil || !strings.Contains(err.Error(), "--health-address: port ") {
		t.Fatalf("a busy port gave %v", err)
	}
	stop()
	if _, err := net.Dial("tcp", e.Addr().String()); err == nil {
		t.Fatal("it still listens")
	}
}

func TestCloseWithoutRun(t *testing.T) {
	dir, err := os.MkdirTemp("", "vg")
	harness.Must(t, err)
	defer os.RemoveAll(dir)
	e, err := NewAdmin(t.Context(), filepath.Join(dir, "admin.sock"), quiet, metrics.NewLB("test"), nil, registerHealth)
	harness.Must(t, err)
	e.Close()
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 0 {
		t.Fatalf("left over: %v, %v", left, err)
	}
}

// The health port is reachable without credentials, so it serves only the health service and few
// streams per connection.
func TestPlainEndpointLimits(t *testing.T) {
	e, err := NewPlain(t.Context(), "health", "127.0.0.1:0", nil, metrics.NewLB("test"), registerHealth)
	harness.Must(t, err)
	harness.Run(t, e.Run)
	conn, err := grpc.NewClient(e.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	defer conn.Close()
	if services := e.server.GetServiceInfo(); len(services) != 1 {
		t.Errorf("services %v, want health only", services)
	}
	ctx := harness.Context(t, time.Minute)
	huge := &healthv1.HealthCheckRequest{Service: strings.Repeat("x", 5<<10)}
	if _, err := healthv1.NewHealthClient(conn).Check(ctx, huge); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a request of 5 KiB: %v", err)
	}
	for range 16 {
		stream, err := healthv1.NewHealthClient(conn).Watch(ctx, &healthv1.HealthCheckRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		harness.Must(t, err)
	}
	short, cancelShort := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancelShort()
	if _, err := healthv1.NewHealthClient(conn).Check(short, &healthv1.HealthCheckRequest{}); err == nil {
		t.Error("a 17th stream was served")
	}
	// A client that does not finish its preface is disconnected.
	silent, err := net.Dial("tcp", e.Addr().String())
	harness.Must(t, err)
	defer silent.Close()
	harness.Must(t, silent.SetReadDeadline(time.Now().Add(30*time.Second)))
	if _, err := io.Copy(io.Discard, silent); err != nil {
		t.Errorf("a silent connection: %v", err)
	}
}

func TestListenTCPAddsLoopback(t *testing.T) {
	for host, want := range map[string]int{"127.0.0.1": 1, "127.0.0.9": 1, "0.0.0.0": 1, "[::]": 1, "[::1]": 1} {
		listeners, err := ListenTCP(t.Context(), host+":0", MaxConnections, true)
		harness.Must(t, err)
		for _, l := range listeners {
			l.Close()
		}
		if len(listeners) != want {
			t.Errorf("%s: %d listeners, want %d", host, len(listeners), want)
		}
	}
}

// exhausted is a listener that temporarily lacks file descriptors.
type exhausted struct {
	net.Listener
	left atomic.Int32
}

func (l *exhausted) Accept() (net.Conn, error) {
	if l.left.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "unix", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return l.Listener.Accept()
}

func TestAcceptRetriesWithoutDescriptors(t *testing.T) {
	dir, err := os.MkdirTemp("", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	inner, err := net.Listen("unix", path)
	harness.Must(t, err)
	l := &exhausted{Listener: inner}
	l.left.Store(3)
	split := newSplitter(l, quiet)
	e := newEndpoint("admin socket", []net.Listener{share{split, split.grpc}}, metrics.NewLB("test"), registerHealth,
		grpc.Creds(insecure.NewCredentials()))
	harness.Run(t, e.Run)
	harness.Must(t, check(t, "unix:"+path))
}

// A killed container leaves its socket file, which the next container replaces.
func TestHealthSocketReplacesLeftover(t *testing.T) {
	dir, err := os.MkdirTemp("", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "health.sock")
	leftover, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	harness.Must(t, err)
	leftover.SetUnlinkOnClose(false)
	harness.Must(t, leftover.Close())
	var reports []error
	e, err := NewPlainSocket(t.Context(), "health socket", "unix://"+path, metrics.NewFrontend("test"),
		func(err error) { reports = append(reports, err) }, registerHealth)
	harness.Must(t, err)
	if len(reports) != 1 || reports[0] != nil {
		t.Errorf("reported %v", reports)
	}
	harness.Run(t, e.Run)
	harness.Check(t, check(t, "unix:"+path))
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if second, err := NewPlainSocket(t.Context(), "health socket", path, metrics.NewFrontend("test"), nil,
		registerHealth); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second one beside it: %v", err)
		if err == nil {
			second.Close()
		}
	}
}
