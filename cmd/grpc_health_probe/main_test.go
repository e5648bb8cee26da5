package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve serves the health services for a container's probes on a unix socket.
func serve(t *testing.T, h *health.Server) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "health.sock")
	l, err := net.Listen("unix", path)
	harness.Must(t, err)
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	if h != nil {
		h.RegisterForContainer(server)
	}
	harness.Serve(t, server, l)
	return "unix://" + path
}

// silent accepts connections without responding, like a hung process.
func silent(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "silent.sock")
	l, err := net.Listen("unix", path)
	harness.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return "unix://" + path
}

func TestExitStatuses(t *testing.T) {
	h := health.New(slog.New(slog.DiscardHandler), func(string, bool, bool) {})
	h.Set(health.Liveness, true, "")
	h.Set(health.Readiness, false, "no gateway session is up yet")
	addr := serve(t, h)
	missing := "unix://" + filepath.Join(t.TempDir(), "absent.sock")
	for _, tt := range []struct {
		name, args string
		status     int
		want       string
	}{
		{"the process", "-addr=" + addr + " -service= -connect-timeout=400ms -rpc-timeout=400ms", 0, "SERVING"},
		{"liveness, two dashes", "--addr " + addr + " --service Liveness", 0, "SERVING"},
		{"not ready", "-addr=" + addr + " -service=Readiness", 4, "no gateway session is up yet"},
		{"unknown service", "-addr=" + addr + " -service=Startup", 3, "\"Startup\"; the services are Liveness, Readiness"},
		{"no health service", "-addr=" + serve(t, nil), 3, "unknown service grpc.health"},
		{"no socket", "-addr=" + missing, 2, "no connection: dial unix"},
		{"silent process", "-addr=" + silent(t) + " -connect-timeout=50ms", 2, "no connection within 50ms"},
		{"no address", "-service=", 1, "-addr is required"},
		{"unknown flag", "-address=x", 1, "-address"},
		{"timeout without unit", "-addr=" + addr + " -rpc-timeout=400", 1, "-rpc-timeout"},
		{"timeout of zero", "-addr=" + addr + " -rpc-timeout=0s", 1, "greater than 0"},
		{"an argument", "-addr=" + addr + " Readiness", 1, "unexpected"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			status := run(t.Context(), strings.Fields(tt.args), &out, io.MultiWriter(&out))
			if status != tt.status || !strings.Contains(out.String(), tt.want) {
				t.Errorf("status %d, output %q; want %d and %q", status, &out, tt.status, tt.want)
			}
		})
	}
}

func TestCallTimeout(t *testing.T) {
	path := filepath.Join(t.TempDir(), "health.sock")
	l, err := net.Listen("unix", path)
	harness.Must(t, err)
	limit, release := make(chan time.Duration, 1), make(chan struct{})
	handle := func(_ any, s grpc.ServerStream) error {
		deadline, _ := s.Context().Deadline()
		limit <- time.Until(deadline)
		<-release // blocks beyond the deadline, because returning would send a response
		return nil
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true), grpc.UnknownServiceHandler(handle))
	harness.Serve(t, server, l)
	var out bytes.Buffer
	args := []string{"-addr=unix://" + path, "-rpc-timeout=50ms"}
	if status := run(t.Context(), args, &out, &out); status != callFailed || !strings.Contains(out.String(), "in time") {
		t.Errorf("status %d, output %q", status, fmt.Sprint(&out))
	}
	if d := <-limit; d > 50*time.Millisecond {
		t.Errorf("the call has %v", d)
	}
	close(release)
}
