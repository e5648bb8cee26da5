package e2e

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"testing"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/vipgate/vipgate/test/lab"
)

// collector is an OTLP collector that keeps the spans by trace.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer
	mu     sync.Mutex
	traces map[string]map[string]*tracepb.Span // by trace ID and name
	by     map[*tracepb.Span]string            // service of each span
}

// Export implements the TraceService.
func (c *collector) Export(_ context.Context, request *collectorpb.ExportTraceServiceRequest,
) (*collectorpb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range request.GetResourceSpans() {
		service := resource.GetResource().GetAttributes()[0].GetValue().GetStringValue()
		for _, span := range resource.GetScopeSpans()[0].GetSpans() {
			id := hex.EncodeToString(span.GetTraceId())
			if c.traces[id] == nil {
				c.traces[id] = map[string]*tracepb.Span{}
			}
			c.traces[id][span.GetName()], c.by[span] = span, service
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// complete returns a trace in which the check of a target failed and the gateways lost its VIP.
func (c *collector) complete() (map[string]*tracepb.Span, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, spans := range c.traces {
		if spans["check"].GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR && spans["export"] != nil {
			return spans, nil
		}
	}
	return nil, fmt.Errorf("none of %d traces has a failed check and an export", len(c.traces))
}

// The failure of a target is one trace of lb and frontend, from the check to the confirmed export.
// Without the collector both work as before, count the lost traces, and stop in time.
func TestTraceOfDecision(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	const endpoint, lost = "127.0.0.1:4317", "vipgate_traces_lost_total"
	listener, err := f.Pod.Listen("tcp", endpoint)
	f.must(err)
	c := &collector{traces: map[string]map[string]*tracepb.Span{}, by: map[*tracepb.Span]string{}}
	server := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(server, c)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	env := []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT=500"}
	f.startLBAs(env, f.pod.LBArgs())
	f.startFrontendAs(env, f.pod.FrontendArgs())
	f.wantRoutes(every()...)
	f.down(f.target1)
	f.wantRoutes(vipB4, vipB6)
	var spans map[string]*tracepb.Span
	f.waitFor(func() (err error) {
		spans, err = c.complete()
		return err
	})
	whole := spans["decision"]
	times := []uint64{whole.GetStartTimeUnixNano()}
	for _, step := range []struct{ name, service string }{
		{"check", "vipgate-lb"},
		{"commit", "vipgate-lb"},
		{"message", "vipgate-frontend"},
		{"gate", "vipgate-frontend"},
		{"bird write", "vipgate-frontend"},
		{"export", "vipgate-frontend"},
	} {
		span := spans[step.name]
		if c.by[span] != step.service || string(span.GetParentSpanId()) != string(whole.GetSpanId()) {
			t.Errorf("%s is of %q with the parent %x, not of %s with %x", step.name, c.by[span], span.GetParentSpanId(),
				step.service, whole.GetSpanId())
		}
		// The frontend may receive the message before lb notes the end of the commit.
		if times = append(times, span.GetStartTimeUnixNano()); step.name != "commit" {
			times = append(times, span.GetEndTimeUnixNano())
		}
	}
	for i, at := range times[1:] {
		if at < times[i] || at == 0 {
			t.Errorf("time %d of the trace precedes the one before: %v\n%v", i+1, times, spans)
		}
	}

	server.Stop()
	f.must(<-ended)
	f.up(f.target1)
	f.wantRoutes(every()...)
	for _, page := range []string{lab.LBMetrics, lab.FrontendMetrics} {
		f.waitFor(func() error {
			if metric(t, f.get(page, "/metrics"), lost) == 0 {
				return errors.New(page + " counts no lost trace")
			}
			return nil
		})
	}
	f.stop(f.pod.Frontend)
	f.stop(f.pod.LB)
}
