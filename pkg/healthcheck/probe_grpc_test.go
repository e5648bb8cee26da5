package healthcheck

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/harness"
)

func grpcCheck(port uint16, change func(*trench.GRPCCheck)) trench.Check {
	c := trench.Check{SingleCheck: trench.SingleCheck{Timeout: impatient, GRPC: trench.GRPCCheck{Port: port}}}
	if change != nil {
		change(&c.GRPC)
	}
	return c
}

// serveGRPC serves what register registers, until the test ends.
func serveGRPC(t *testing.T, at netip.Addr, register func(*grpc.Server), o ...grpc.ServerOption) (port uint16) {
	t.Helper()
	l, port := listen(t, at)
	s := grpc.NewServer(o...)
	register(s)
	var serving sync.WaitGroup
	serving.Go(func() {
		harness.Check(t, s.Serve(l))
	})
	t.Cleanup(func() {
		s.Stop()
		serving.Wait()
	})
	return port
}

// healthy registers a health service with one service of each state.
func healthy(t *testing.T) func(*grpc.Server) {
	t.Helper()
	h := health.NewServer()
	h.SetServingStatus("pkg.Good", healthv1.HealthCheckResponse_SERVING)
	h.SetServingStatus("pkg.Bad", healthv1.HealthCheckResponse_NOT_SERVING)
	h.SetServingStatus("pkg.Unclear", healthv1.HealthCheckResponse_UNKNOWN)
	return func(s *grpc.Server) { healthv1.RegisterHealthServer(s, h) }
}

type (
	request  = healthv1.HealthCheckRequest
	response = healthv1.HealthCheckResponse
)

// healthFunc is a health service that answers by a function.
type healthFunc struct {
	healthv1.UnimplementedHealthServer
	check func(context.Context) (*response, error)
}

func (f healthFunc) Check(ctx context.Context, _ *request) (*response, error) { return f.check(ctx) }

func (f healthFunc) register(s *grpc.Server) { healthv1.RegisterHealthServer(s, f) }

func failing(code codes.Code, message string) func(*grpc.Server) {
	err := status.Error(code, message)
	return healthFunc{check: func(context.Context) (*response, error) { return nil, err }}.register
}

func TestGRPCAnswers(t *testing.T) {
	for _, tt := range []struct {
		name, service string
		register      func(*grpc.Server)
		want          string // "" for success
	}{
		{"the server", "", healthy(t), ""},
		{"a service", "pkg.Good", healthy(t), ""},
		{"not serving", "pkg.Bad", healthy(t), "service pkg.Bad is NOT_SERVING"},
		{"unknown", "pkg.Unclear", healthy(t), "service pkg.Unclear is UNKNOWN"},
		{"no such service", "pkg.None", healthy(t), "service pkg.None is not known there"},
		{"no health service", "", func(*grpc.Server) {}, "no grpc.health.v1 here"},
		{"not allowed", "", failing(codes.PermissionDenied, "who are you?"), "PermissionDenied: who are you?"},
		{"busy", "", failing(codes.Unavailable, "come back later"), "Unavailable: come back later"},
		{"terminal sequences", "", failing(codes.Internal, "\x1b[2J\r\nowned"), `Internal: "\x1b[2J\r\nowned"`},
		{
			"a long message", "", failing(codes.Internal, strings.Repeat("x", 1000)),
			"Internal: " + strings.Repeat("x", 120) + "…",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, at netip.Addr) {
				port := serveGRPC(t, at, tt.register)
				o := ask(t, newPlan(grpcCheck(port, func(c *trench.GRPCCheck) { c.Service = tt.service })), at, patient)
				if tt.want != "" {
					wantFailure(t, o, port, tt.want)
				} else if o != (outcome{verdict: succeeded}) {
					t.Errorf("got %+v", o)
				}
			})
		})
	}
}

func TestGRPCAuthorityAndUserAgent(t *testing.T) {
	a := newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.pem")
	a.write(t, file)
	cert := a.sign(t, time.Now().Add(time.Hour), "127.0.0.1", "::1", "example.org")
	secure := grpc.Creds(credentials.NewServerTLSFromCert(&cert))
	for _, tt := range []struct {
		name  string
		o     []grpc.ServerOption
		check trench.TLSCheck
		want  string // "" for address and port
	}{
		{"plaintext", nil, trench.TLSCheck{}, ""},
		{"TLS by address", []grpc.ServerOption{secure}, trench.TLSCheck{On: true, CAFile: file}, ""},
		{
			"TLS by name",
			[]grpc.ServerOption{secure},
			trench.TLSCheck{On: true, CAFile: file, ServerName: "example.org"},
			"example.org",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, at netip.Addr) {
				received := make(chan metadata.MD, 1)
				port := serveGRPC(t, at, healthFunc{check: func(ctx context.Context) (*response, error) {
					md, _ := metadata.FromIncomingContext(ctx)
					received <- md
					return &response{Status: healthv1.HealthCheckResponse_SERVING}, nil
				}}.register, tt.o...)
				p := newPlan(grpcCheck(port, func(c *trench.GRPCCheck) { c.TLS = tt.check }))
				if o := ask(t, p, at, patient); o.verdict != succeeded {
					t.Fatalf("got %+v", o)
				}
				want := tt.want
				if want == "" {
					want = netip.AddrPortFrom(at, port).String()
				}
				md := <-received
				if got := md.Get(":authority"); len(got) != 1 || got[0] != want {
					t.Errorf("authority %v, want %s", got, want)
				}
				if got := md.Get("user-agent"); len(got) != 1 || !strings.HasPrefix(got[0], "vipgate-check ") {
					t.Errorf("user agent %v", got)
				}
			})
		})
	}
}

func TestGRPCCheckOverTLS(t *testing.T) {
	trusted, untrusted := newAuthority(t), newAuthority(t)
	file := filepath.Join(t.TempDir(), "ca.pem")
	trusted.write(t, file)
	soon := time.Now().Add(time.Hour)
	good := trusted.sign(t, soon, "127.0.0.1", "::1")
	onBoth(t, func(t *testing.T, at netip.Addr) {
		serve := func(config *tls.Config) uint16 {
			return serveGRPC(t, at, healthy(t), grpc.Creds(credentials.NewTLS(config)))
		}
		port := serve(&tls.Config{Certificates: []tls.Certificate{good}})
		check := func(port uint16, s trench.TLSCheck) outcome {
			s.On = true
			return ask(t, newPlan(grpcCheck(port, func(c *trench.GRPCCheck) { c.TLS = s })), at, patient)
		}
		if o := check(port, trench.TLSCheck{CAFile: file}); o.verdict != succeeded {
			t.Errorf("got %+v", o)
		}
		if o := check(port, trench.TLSCheck{Insecure: true, ServerName: "b.example"}); o.verdict != succeeded {
			t.Errorf("insecure: %+v", o)
		}
		wantFailure(t, check(port, trench.TLSCheck{CAFile: file, ServerName: "b.example"}), port,
			"the certificate is not for b.example")
		if o := check(port, trench.TLSCheck{CAFile: file + ".none"}); o.verdict != notRun ||
			!strings.HasPrefix(o.reason, "check not run: caFile: ") {
			t.Errorf("no authorities: %+v", o)
		}
		port = serve(&tls.Config{Certificates: []tls.Certificate{untrusted.sign(t, soon, "127.0.0.1", "::1")}})
		wantFailure(t, check(port, trench.TLSCheck{CAFile: file}), port,
			"the certificate is signed by an authority that is not trusted")

		web := serveTLS(t, at, &tls.Config{Certificates: []tls.Certificate{good}})
		wantFailure(t, check(web, trench.TLSCheck{CAFile: file}), web,
			"the TLS server does not speak HTTP/2, which gRPC needs (ALPN h2)")
		plain := serveGRPC(t, at, healthy(t))
		wantFailure(t, check(plain, trench.TLSCheck{CAFile: file}), plain, "no TLS here")
	})
}

func TestGRPCSilence(t *testing.T) {
	onBoth(t, func(t *testing.T, at netip.Addr) {
		silentUntilClosed := serveRaw(t, at, func(conn net.Conn) { _ = untilClosed(conn) })
		wantFailureInTime(t, newPlan(grpcCheck(silentUntilClosed, nil)), at, silentUntilClosed,
			"connected, but no answer in 100ms")

		slow := serveGRPC(t, at, healthFunc{check: func(ctx context.Context) (*response, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}.register)
		wantFailureInTime(t, newPlan(grpcCheck(slow, nil)), at, slow, "connected, but no answer in 100ms")

		closing := serveRaw(t, at, func(net.Conn) {})
		wantFailure(t, ask(t, newPlan(grpcCheck(closing, nil)), at, patient), closing, "closed the connection: no answer")
		web := serveRaw(t, at, func(conn net.Conn) {
			_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))
			_ = untilClosed(conn)
		})
		if o := ask(t, newPlan(grpcCheck(web, nil)), at, patient); o.verdict != failed || o.silent ||
			!strings.Contains(o.reason, ": no gRPC here: ") {
			t.Errorf("got %+v", o)
		}

		l, refused := listen(t, at)
		harness.Must(t, l.Close())
		wantFailure(t, ask(t, newPlan(grpcCheck(refused, nil)), at, patient), refused, "connection refused")

		wantDialFailures(t, newPlan(grpcCheck(1, nil)), at)
	})
}

// An HTTP/2 server without gRPC.
func TestGRPCCheckOfWebServer(t *testing.T) {
	onBoth(t, func(t *testing.T, at netip.Addr) {
		l, port := listen(t, at)
		s := &http.Server{Handler: http.NotFoundHandler(), Protocols: new(http.Protocols)}
		s.Protocols.SetUnencryptedHTTP2(true)
		var serving sync.WaitGroup
		serving.Go(func() { _ = s.Serve(l) })
		defer serving.Wait()
		defer s.Close()
		wantFailure(t, ask(t, newPlan(grpcCheck(port, nil)), at, patient), port, "no grpc.health.v1 here")
	})
}

// A check is one connection: rise and fall count tries.
func TestGRPCCheckDoesNotRetry(t *testing.T) {
	at := loopbacks[0]
	var connections atomic.Int32
	port := serveRaw(t, at, func(net.Conn) { connections.Add(1) })
	p := newPlan(grpcCheck(port, nil))
	for range 5 {
		if o := ask(t, p, at, patient); o.verdict != failed {
			t.Errorf("got %+v", o)
		}
	}
	var dials int
	_ = p.probe(t.Context(), func(context.Context, string, string) (net.Conn, error) {
		dials++
		return nil, syscall.ECONNREFUSED
	}, at, at)
	if n := connections.Load(); n > 5 || dials != 1 {
		t.Errorf("5 checks opened %d connections, and one dialed %d times", n, dials)
	}
}

// A stop of the checker does not wait for the timeout, nor leave a dialer that
// runs on.
func TestGRPCCheckEndsWithItsContext(t *testing.T) {
	at := loopbacks[0]
	ctx, cancel := context.WithCancel(t.Context())
	var ended atomic.Bool
	o := newPlan(grpcCheck(1, nil)).probe(ctx, func(dialing context.Context, _, _ string) (net.Conn, error) {
		cancel()
		<-dialing.Done()
		ended.Store(true)
		return nil, dialing.Err()
	}, at, at)
	if o.verdict == succeeded || !ended.Load() {
		t.Errorf("got %+v, the dialer has ended: %t", o, ended.Load())
	}
}

func TestConcurrentGRPCChecks(t *testing.T) {
	at := loopbacks[1]
	p := newPlan(grpcCheck(serveGRPC(t, at, healthy(t)), nil))
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if o := ask(t, p, at, patient); o.verdict != succeeded {
				t.Errorf("got %+v", o)
			}
		})
	}
	all.Wait()
}
