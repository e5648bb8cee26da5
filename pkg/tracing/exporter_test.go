package tracing

import (
	"context"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func position(revision uint64) readiness.Position {
	return readiness.Position{InstanceID: "instance", Revision: revision}
}

func TestEnvironment(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317"
	for _, tt := range []struct {
		name     string
		env      []string
		on       bool
		problem  string
		fraction float64 // of sampled decisions
	}{
		{name: "nothing"},
		{name: "sampler without endpoint", env: []string{"OTEL_TRACES_SAMPLER=always_on"}},
		{name: "endpoint", env: []string{endpoint}, on: true, fraction: 1},
		{name: "disabled", env: []string{endpoint, "OTEL_SDK_DISABLED=true"}},
		{name: "no exporter", env: []string{endpoint, "OTEL_TRACES_EXPORTER=none"}},
		{
			name: "a tenth", on: true, fraction: 0.1,
			env: []string{endpoint, "OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0.1"},
		},
		{name: "never", env: []string{endpoint, "OTEL_TRACES_SAMPLER=always_off"}, on: true},
		{
			name: "invalid ratio", problem: "between 0 and 1",
			env: []string{endpoint, "OTEL_TRACES_SAMPLER=traceidratio", "OTEL_TRACES_SAMPLER_ARG=2"},
		},
		{name: "unknown sampler", env: []string{endpoint, "OTEL_TRACES_SAMPLER=jaeger_remote"}, problem: "always_on"},
		{name: "HTTP", env: []string{endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"}, problem: "grpc only"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, variable := range tt.env {
				name, value, _ := strings.Cut(variable, "=")
				t.Setenv(name, value)
			}
			tracer, err := New("lb", "test", quiet)
			if (tracer != nil) != tt.on || (err != nil) != (tt.problem != "") {
				t.Fatalf("got %v, error %v", tracer, err)
			}
			if err != nil && !strings.Contains(err.Error(), tt.problem) {
				t.Errorf("error %v, want %s", err, tt.problem)
			}
			if !tt.on {
				return
			}
			const decisions = 10_000
			other, err := New("frontend", "test", quiet)
			harness.Must(t, err)
			count := 0.0
			for revision := range uint64(decisions) {
				is := tracer.(*Exporter).sampled(position(revision))
				if is != other.(*Exporter).sampled(position(revision)) {
					t.Fatalf("lb and frontend disagree about revision %d", revision)
				}
				if is {
					count++
				}
			}
			if got := count / decisions; got < tt.fraction-0.02 || got > tt.fraction+0.02 {
				t.Errorf("%v of the decisions are sampled, want %v", got, tt.fraction)
			}
		})
	}
}

// An endpoint that accepts connections and never answers costs traces, and nothing else.
func TestDeadEndpoint(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, conn); conn.Close() }()
		}
	}()
	defer listener.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+listener.Addr().String())
	tracer, err := New("lb", "test", quiet)
	harness.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- tracer.Run(ctx) }()
	const decisions = 10 * maxQueued
	done := make(chan struct{})
	go func() {
		defer close(done)
		for revision := range uint64(decisions) {
			tracer.Follow(position(revision), func(context.Context) []journal.Step {
				return []journal.Step{{Name: journal.WholeDecision, Start: time.Now(), End: time.Now()}}
			})
		}
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("recording waits for the endpoint")
	}
	if got := tracer.Lost(); got < decisions-4*maxQueued {
		t.Errorf("%d traces are lost", got)
	}
	cancel()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
		t.Fatal("the end of the process waits for the endpoint")
	}
	if got := tracer.Lost(); got != decisions {
		t.Errorf("%d of %d traces are counted as lost", got, decisions)
	}
}
