package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	serving    = healthv1.HealthCheckResponse_SERVING
	notServing = healthv1.HealthCheckResponse_NOT_SERVING
	unknown    = healthv1.HealthCheckResponse_SERVICE_UNKNOWN
)

// waitLimit bounds every wait for a condition.
const waitLimit = 30 * time.Second

// vips are scripted states of VIPs.
type vips struct {
	*Server
	mu     sync.Mutex
	states map[vip.VIP]bool
}

func newVIPs(s *Server) *vips {
	v := &vips{Server: s, states: map[vip.VIP]bool{}}
	s.ServeVIPs(func(x vip.VIP) (serving, known bool) {
		v.mu.Lock()
		defer v.mu.Unlock()
		serving, known = v.states[x]
		return serving, known
	})
	return v
}

func (v *vips) set(x string, serving bool) {
	v.mu.Lock()
	v.states[vip.Require(x)] = serving
	v.mu.Unlock()
	v.VIPsChanged()
}

func (v *vips) remove(x string) {
	v.mu.Lock()
	delete(v.states, vip.Require(x))
	v.mu.Unlock()
	v.VIPsChanged()
}

func newServer() *Server { return New(slog.New(slog.DiscardHandler), func(string, bool, bool) {}) }

// serve serves s on a TCP port and returns its address.
func serve(t *testing.T, s *Server) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	s.Register(server)
	harness.Serve(t, server, listener)
	return listener.Addr().String()
}

func dial(t *testing.T, addr string) healthv1.HealthClient {
	t.Helper()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	return healthv1.NewHealthClient(conn)
}

func check(t *testing.T, s *Server, service string) healthv1.HealthCheckResponse_ServingStatus {
	t.Helper()
	r, err := s.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
	if status.Code(err) == codes.NotFound {
		return unknown
	}
	if err != nil {
		t.Fatalf("Check(%q): %v", service, err)
	}
	return r.GetStatus()
}

// follow reads a Watch call.
func follow(t *testing.T, client healthv1.HealthClient,
	service string,
) grpc.ServerStreamingClient[healthv1.HealthCheckResponse] {
	t.Helper()
	ctx := harness.Context(t, waitLimit)
	stream, err := client.Watch(ctx, &healthv1.HealthCheckRequest{Service: service})
	harness.Must(t, err)
	return stream
}

func wantNext(t *testing.T, stream grpc.ServerStreamingClient[healthv1.HealthCheckResponse],
	want healthv1.HealthCheckResponse_ServingStatus,
) {
	t.Helper()
	r, err := stream.Recv()
	if err != nil {
		t.Fatalf("got %v, want %v", err, want)
	}
	if r.GetStatus() != want {
		t.Fatalf("got %v, want %v", r.GetStatus(), want)
	}
}

func TestConjunction(t *testing.T) {
	s := newServer()
	s.Define(Readiness, "Configuration", "Egress", "Stream")
	for _, step := range []struct {
		part   string
		up     bool
		detail string
		want   Condition
	}{
		{"Configuration", true, "", Condition{Readiness, false, "Egress: not reported yet; Stream: not reported yet"}},
		{"Egress", true, "ignored while it serves", Condition{Readiness, false, "Stream: not reported yet"}},
		{"Stream", false, "", Condition{Readiness, false, "Stream"}},
		{"Stream", true, "", Condition{Readiness, true, ""}},
		{"Egress", false, "gateway-a-1: Idle", Condition{Readiness, false, "Egress: gateway-a-1: Idle"}},
		{"Egress", false, "gateway-a-1: Active", Condition{Readiness, false, "Egress: gateway-a-1: Active"}},
		{"Identity", false, "no part of it", Condition{Readiness, false, "Egress: gateway-a-1: Active"}},
		{"Egress", true, "", Condition{Readiness, true, ""}},
	} {
		s.Set(step.part, step.up, step.detail)
		all := s.Conditions()
		at := slices.IndexFunc(all, func(c *adminv1.Condition) bool { return c.GetName() == Readiness })
		if got := (Condition{Readiness, all[at].GetServing(), all[at].GetDetail()}); got != step.want {
			t.Fatalf("after %s=%v: got %+v, want %+v", step.part, step.up, got, step.want)
		}
		want := notServing
		if step.want.Serving {
			want = serving
		}
		for _, service := range []string{Readiness, ""} {
			if got := check(t, s, service); got != want {
				t.Fatalf("after %s=%v: %q is %v, want %v", step.part, step.up, service, got, want)
			}
		}
	}
}

func TestNestedConjunction(t *testing.T) {
	s := newServer()
	s.Define("Inner", "A")
	s.Define("Outer", "Inner", "B")
	s.Set("B", true, "")
	s.Set("A", true, "")
	if got := check(t, s, "Outer"); got != serving {
		t.Fatalf("got %v", got)
	}
	s.Remove("A")
	if got := check(t, s, "Outer"); got != notServing {
		t.Fatalf("a part is forgotten, the whole is %v", got)
	}
	if got := check(t, s, "A"); got != unknown {
		t.Fatalf("a forgotten condition is %v", got)
	}
}

func TestSetConjunctionPanics(t *testing.T) {
	s := newServer()
	s.Define(Readiness, "A")
	defer func() {
		if recover() == nil {
			t.Fatal("a conjunction was set")
		}
	}()
	s.Set(Readiness, true, "")
}

func TestChangedOnFlipsOnly(t *testing.T) {
	var changes []string
	s := New(slog.New(slog.DiscardHandler), func(service string, serving, known bool) {
		changes = append(changes, strings.TrimSuffix(fmt.Sprint(service, " ", serving, " ", known), " true"))
	})
	s.Define(Readiness, "A")
	s.Set("A", false, "why")
	s.Set("A", false, "another why")
	s.Set("A", true, "")
	s.Set("A", true, "")
	s.Set("B", false, "why")
	s.Remove("B")
	s.Remove("B")
	want := []string{"Readiness false", "A false", "A true", "Readiness true", "B false", "B false false"}
	if d := cmp.Diff(want, changes); d != "" {
		t.Fatal(d)
	}
}

func TestVIPsAreNotListed(t *testing.T) {
	s := newServer()
	if got := check(t, s, "vip/20.0.0.1/32"); got != unknown {
		t.Errorf("without VIPs: %v", got)
	}
	s.Set(Liveness, true, "")
	vips := newVIPs(s)
	vips.set("20.0.0.1/32", true)
	vips.set("2000::1/128", false)
	for service, want := range map[string]healthv1.HealthCheckResponse_ServingStatus{
		"vip/20.0.0.1/32": serving, "vip/2000::1/128": notServing, "vip/2000:0:0::0001/128": notServing,
		"vip/20.0.0.2/32": unknown, "no such": unknown, Readiness: unknown, "": notServing, Liveness: serving,
	} {
		if got := check(t, s, service); got != want {
			t.Errorf("%q is %v, want %v", service, got, want)
		}
	}
	vips.remove("20.0.0.1/32")
	if got := check(t, s, "vip/20.0.0.1/32"); got != unknown {
		t.Errorf("a removed VIP is %v", got)
	}
	for i := range 10_000 {
		vips.set(fmt.Sprintf("20.1.%d.%d/32", i/256, i%256), true)
	}
	list, err := s.List(t.Context(), &healthv1.HealthListRequest{})
	harness.Must(t, err)
	var names []string
	for name := range list.GetStatuses() {
		names = append(names, name)
	}
	slices.Sort(names)
	if d := cmp.Diff([]string{"", Liveness}, names); d != "" {
		t.Fatal(d)
	}
}

func TestInvalidServiceNames(t *testing.T) {
	s := newServer()
	for _, name := range []string{"vip/", "vip/20.0.0.1", "vip/0.0.0.0/0", strings.Repeat("x", 257)} {
		_, err := s.Check(t.Context(), &healthv1.HealthCheckRequest{Service: name})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("%q: got %v", name, err)
		}
	}
}

func TestWatchUnknownService(t *testing.T) {
	s := newServer()
	vips := newVIPs(s)
	client := dial(t, serve(t, s))
	condition, v := follow(t, client, "Egress"), follow(t, client, "vip/2000:0::0001/128")
	wantNext(t, condition, unknown)
	wantNext(t, v, unknown)
	for _, up := range []bool{true, false, true} {
		want := notServing
		if up {
			want = serving
		}
		s.Set("Egress", up, "")
		vips.set("2000::1/128", up)
		wantNext(t, condition, want)
		wantNext(t, v, want)
	}
	s.Remove("Egress")
	vips.remove("2000::1/128")
	wantNext(t, condition, unknown)
	wantNext(t, v, unknown)
}

func TestWatchEmptyNameIsReadiness(t *testing.T) {
	s := newServer()
	s.Define(Readiness, "A")
	whole := follow(t, dial(t, serve(t, s)), "")
	wantNext(t, whole, notServing)
	s.Set("A", true, "")
	wantNext(t, whole, serving)
}

// The kubelet must not restart a container that waits for a gateway, although its probes do not
// name a service.
func TestUnnamedServiceOfContainerIsLiveness(t *testing.T) {
	s := newServer()
	s.Set(Liveness, true, "")
	s.Set(Readiness, false, "no gateway session is up yet")
	c := containerServer{s}
	for service, want := range map[string]healthv1.HealthCheckResponse_ServingStatus{
		"": serving, Liveness: serving, Readiness: notServing,
	} {
		r, err := c.Check(t.Context(), &healthv1.HealthCheckRequest{Service: service})
		if err != nil || r.GetStatus() != want {
			t.Errorf("%q is %v, %v; want %v", service, r.GetStatus(), err, want)
		}
	}
	list, err := c.List(t.Context(), &healthv1.HealthListRequest{})
	if err != nil || list.GetStatuses()[""].GetStatus() != serving {
		t.Errorf("listed: %v, %v", list, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var last healthv1.HealthCheckResponse_ServingStatus
	_ = c.Watch(&healthv1.HealthCheckRequest{}, &watching{ctx: ctx, sent: func(r *healthv1.HealthCheckResponse) {
		last = r.GetStatus()
		cancel()
	}})
	if last != serving {
		t.Errorf("watched: %v, want %v", last, serving)
	}
}

// watching is a Watch that passes its messages to a function.
type watching struct {
	grpc.ServerStream
	ctx  context.Context
	sent func(*healthv1.HealthCheckResponse)
}

func (w *watching) Context() context.Context { return w.ctx }
func (w *watching) Send(r *healthv1.HealthCheckResponse) error {
	w.sent(r)
	return nil
}

func TestWatchesAreIndependent(t *testing.T) {
	vips := newVIPs(newServer())
	client := dial(t, serve(t, vips.Server))
	vips.set("20.0.0.2/32", true)
	quiet, loud := follow(t, client, "vip/20.0.0.2/32"), follow(t, client, "vip/20.0.0.1/32")
	wantNext(t, quiet, serving)
	wantNext(t, loud, unknown)
	vips.set("20.0.0.1/32", true)
	wantNext(t, loud, serving)
	vips.set("20.0.0.2/32", false)
	wantNext(t, quiet, notServing)
}

// stuck is a reader whose Send blocks until it is released.
type stuck struct {
	grpc.ServerStream
	ctx  context.Context
	sent chan healthv1.HealthCheckResponse_ServingStatus
}

func (s *stuck) Context() context.Context { return s.ctx }
func (s *stuck) Send(r *healthv1.HealthCheckResponse) error {
	s.sent <- r.GetStatus()
	return nil
}

func TestStuckReaderDelaysNoOtherReader(t *testing.T) {
	s := newServer()
	s.Set("A", false, "")
	ctx, cancel := context.WithCancel(t.Context())
	reader := &stuck{ctx: ctx, sent: make(chan healthv1.HealthCheckResponse_ServingStatus)}
	done := make(chan error, 1)
	go func() { done <- s.Watch(&healthv1.HealthCheckRequest{Service: "A"}, reader) }()
	if got := <-reader.sent; got != notServing {
		t.Fatalf("got %v", got)
	}
	for i := range 1001 { // must not block, although the reader reads at most one message
		s.Set("A", i%2 == 0, "")
	}
	for last := notServing; last != serving; {
		last = <-reader.sent
	}
	cancel()
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Fatalf("got %v", err)
	}
}

func TestShutdown(t *testing.T) {
	s := newServer()
	s.Define(Readiness, "A")
	s.Set("A", true, "")
	s.Set(Liveness, true, "")
	client := dial(t, serve(t, s))
	ready, live := follow(t, client, Readiness), follow(t, client, Liveness)
	wantNext(t, ready, serving)
	wantNext(t, live, serving)
	s.Shutdown()
	s.Shutdown()
	s.Set("A", true, "")
	wantNext(t, ready, notServing)
	for name, stream := range map[string]grpc.ServerStreamingClient[healthv1.HealthCheckResponse]{
		Readiness: ready,
		Liveness:  live,
	} {
		if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if got := check(t, s, Liveness); got != serving {
		t.Errorf("Liveness is %v: a process that stops in order would be killed", got)
	}
	late := follow(t, client, Readiness)
	wantNext(t, late, notServing)
	if _, err := late.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("a late watch got %v", err)
	}
}

func TestWatchLimit(t *testing.T) {
	s := newServer()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, maxWatches)
	sent := make(chan healthv1.HealthCheckResponse_ServingStatus)
	for i := range maxWatches {
		go func() {
			r := &healthv1.HealthCheckRequest{Service: fmt.Sprint("service ", i)}
			ended <- s.Watch(r, &stuck{ctx: ctx, sent: sent})
		}()
		<-sent
	}
	if err := s.Watch(&healthv1.HealthCheckRequest{}, &stuck{}); status.Code(err) != codes.ResourceExhausted {
		t.Fatalf("got %v", err)
	}
	cancel()
	for range maxWatches {
		<-ended
	}
	if n := s.watches.Load(); n != 0 {
		t.Fatalf("%d watches are left", n)
	}
}

func TestCheckClientErrors(t *testing.T) {
	s := newServer()
	s.Set("Up", true, "")
	s.Set("Down", false, "why")
	addr := serve(t, s)
	gone, err := net.Listen("tcp", "127.0.0.2:0") // an address without a listener
	harness.Must(t, err)
	harness.Must(t, gone.Close())
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer silent.Close()
	for _, tt := range []struct {
		name, addr, service string
		want                string
	}{
		{"serving", addr, "Up", ""},
		{"not serving", addr, "Down", "not serving: why"},
		{"unknown", addr, "Sideways", `unknown service "Sideways"`},
		{"no listener", gone.Addr().String(), "Up", "connection refused"},
		{"no answer", silent.Addr().String(), "Up", "no response in time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := t.Context()
			if tt.addr != silent.Addr().String() {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, waitLimit)
				defer cancel()
			}
			err := CheckClient(ctx, tt.addr, tt.service)
			switch {
			case tt.want == "" && err != nil, tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Fatalf("got %v, want %q", err, tt.want)
			case err != nil && (strings.Contains(err.Error(), "rpc error") || strings.Contains(err.Error(), "desc =")):
				t.Fatalf("gRPC's words: %v", err)
			case errors.Is(err, ErrNotServing) != (tt.service == "Down"):
				t.Fatalf("errors.Is(%v, ErrNotServing) is wrong", err)
			}
		})
	}
}

func TestLogOfFlips(t *testing.T) {
	var out strings.Builder
	s := New(slog.New(slog.NewTextHandler(&out, nil)), func(string, bool, bool) {})
	s.Set("A", false, "why")
	s.Set("A", false, "why")
	s.Set("A", true, "")
	newVIPs(s).set("20.0.0.1/32", true)
	if n := strings.Count(out.String(), "\n"); n != 2 || !strings.Contains(out.String(), "detail=why") {
		t.Fatalf("logged %d lines:\n%s", n, out.String())
	}
}

// loop is a task with a name that is overdue.
type loop struct {
	name    string
	overdue time.Duration
}

func (l *loop) Run(context.Context) error { return nil }
func (l *loop) String() string            { return l.name }

func (l *loop) Overdue() time.Duration { return l.overdue }

// idle is a task without a loop.
type idle struct{}

func (idle) Run(context.Context) error { return nil }
func (idle) String() string            { return "idle" }

// A Check of Liveness does not depend on another goroutine, and names the hung tasks.
func TestLivenessNamesHungTasks(t *testing.T) {
	s := newServer()
	gate, bird, watcher := &loop{name: "gate"}, &loop{name: "BIRD"}, &loop{name: "trench-watcher"}
	s.Alive(gate, gate, bird, idle{}, watcher)
	for _, c := range []struct {
		gate, bird, watcher time.Duration
		want                string
	}{
		{0, 0, 0, ""},
		{HungDecision - 1, HungTask - 1, HungTask - 1, ""},
		{HungDecision, HungTask - 1, 0, "task gate hangs for 10s"},
		{0, HungTask, time.Minute, "task BIRD hangs for 30s; task trench-watcher hangs for 1m0s"},
		{time.Minute, 0, 0, "task gate hangs for 1m0s"},
		{0, 0, 0, ""},
	} {
		gate.overdue, bird.overdue, watcher.overdue = c.gate, c.bird, c.watcher
		r, err := s.Check(t.Context(), &healthv1.HealthCheckRequest{Service: Liveness})
		harness.Must(t, err)
		if serving := r.GetStatus() == healthv1.HealthCheckResponse_SERVING; serving != (c.want == "") {
			t.Errorf("%v: status %v", c, r.GetStatus())
		}
		if got := s.Conditions(); len(got) != 1 || got[0].Detail != c.want {
			t.Errorf("%v: got %v", c, got)
		}
	}
}
