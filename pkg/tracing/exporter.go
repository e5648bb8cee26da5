package tracing

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	resourcepb "go.opentelemetry.io/proto/otlp/resource/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/vipgate/vipgate/pkg/backoff"
	"github.com/vipgate/vipgate/pkg/journal"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
)

const (
	maxQueued   = 1024                   // decisions
	batchDelay  = 200 * time.Millisecond // collects the decisions of one request
	lastTimeout = 100 * time.Millisecond // of the request at the end of the process
)

// Exporter implements journal.Tracer.
type Exporter struct {
	client   otlptrace.Client
	resource *resourcepb.Resource
	log      *slog.Logger
	bound    uint64               // trace IDs below it are sampled
	followed chan followed        // decisions whose steps continue
	ended    chan []*tracepb.Span // decisions to export
	lost     atomic.Uint64
	throttle logs.Throttle
}

type followed struct {
	position readiness.Position
	steps    func(context.Context) []journal.Step
}

// New returns the exporter of a program, or nil if the environment names no endpoint.
func New(program, version string, log *slog.Logger) (journal.Tracer, error) {
	endpoint := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"))
	if endpoint == "" || strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") ||
		os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return nil, nil
	}
	protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"), "grpc")
	if protocol != "grpc" {
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%s: traces are exported by grpc only; use its port, mostly 4317",
			protocol)
	}
	ratio, err := share()
	if err != nil {
		return nil, err
	}
	exporter := &Exporter{
		client: otlptracegrpc.NewClient(), log: log, bound: uint64(ratio * math.MaxInt64),
		followed: make(chan followed, maxQueued), ended: make(chan []*tracepb.Span, maxQueued),
		resource: &resourcepb.Resource{Attributes: []*commonpb.KeyValue{
			attribute("service.name", cmp.Or(os.Getenv("OTEL_SERVICE_NAME"), "vipgate-"+program)),
			attribute("service.version", version),
		}},
	}
	for _, own := range resource.Environment().Attributes() {
		if own.Key != "service.name" {
			exporter.resource.Attributes = append(exporter.resource.Attributes,
				attribute(string(own.Key), own.Value.String()))
		}
	}
	log.Info("traces are exported", "endpoint", endpoint, "sampled", ratio)
	return exporter, nil
}

func share() (ratio float64, err error) {
	name, argument := os.Getenv("OTEL_TRACES_SAMPLER"), os.Getenv("OTEL_TRACES_SAMPLER_ARG")
	switch strings.TrimPrefix(name, "parentbased_") {
	case "", "always_on":
		return 1, nil
	case "always_off":
		return 0, nil
	case "traceidratio":
		if ratio, err = strconv.ParseFloat(cmp.Or(argument, "1"), 64); err == nil && ratio >= 0 && ratio <= 1 {
			return ratio, nil
		}
		return 0, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG=%s: the ratio is between 0 and 1", argument)
	}
	return 0, fmt.Errorf("OTEL_TRACES_SAMPLER=%s: use always_on, always_off or traceidratio", name)
}

// identify returns the trace ID of a decision, and the span ID of its whole.
func identify(position readiness.Position) (trace, whole []byte) {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", position.InstanceID, position.Revision))
	return sum[:16], sum[16:24]
}

// sampled reports whether a decision has a trace, as the sampler traceidratio of OpenTelemetry.
func (exporter *Exporter) sampled(position readiness.Position) bool {
	trace, _ := identify(position)
	return binary.BigEndian.Uint64(trace[8:])>>1 < exporter.bound
}

// Follow implements journal.Tracer.
func (exporter *Exporter) Follow(position readiness.Position, steps func(context.Context) []journal.Step) {
	if exporter.sampled(position) {
		queue(exporter, exporter.followed, followed{position, steps})
	}
}

// queue adds a value unless the queue is full.
func queue[T any](exporter *Exporter, queue chan<- T, value T) {
	select {
	case queue <- value:
	default:
		exporter.lost.Add(1)
	}
}

// Lost implements journal.Tracer.
func (exporter *Exporter) Lost() uint64 { return exporter.lost.Load() }

// String implements task.Task.
func (exporter *Exporter) String() string { return "trace exporter" }

// Run exports until ctx ends, and then the ended decisions once.
func (exporter *Exporter) Run(ctx context.Context) error {
	if err := exporter.client.Start(ctx); err != nil {
		return fmt.Errorf("failed to start the trace exporter: %w", err)
	}
	// A slow endpoint must not delay the confirmations that end steps.
	var following sync.WaitGroup
	following.Go(func() { exporter.follow(ctx) })
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case first := <-exporter.ended:
			_ = backoff.Sleep(ctx, batchDelay) // the loop checks ctx
			exporter.upload(ctx, first)
		}
	}
	following.Wait()
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTimeout)
	defer cancel()
	exporter.upload(last, nil)
	_ = exporter.client.Stop(last) // it closes the connection
	return ctx.Err()
}

// follow awaits the steps of one decision after another until ctx ends.
func (exporter *Exporter) follow(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			exporter.lost.Add(uint64(len(exporter.followed)))
			return
		case next := <-exporter.followed:
			queue(exporter, exporter.ended, spans(next.position, next.steps(ctx)))
		}
	}
}

// upload exports the ended decisions in one request, which the client bounds and repeats.
func (exporter *Exporter) upload(ctx context.Context, all []*tracepb.Span) {
	decisions := uint64(min(1, len(all)))
	for ; len(exporter.ended) > 0; decisions++ {
		all = append(all, <-exporter.ended...)
	}
	if decisions == 0 {
		return
	}
	err := exporter.client.UploadTraces(ctx, []*tracepb.ResourceSpans{{
		Resource:   exporter.resource,
		ScopeSpans: []*tracepb.ScopeSpans{{Scope: &commonpb.InstrumentationScope{Name: "vipgate"}, Spans: all}},
	}})
	if err != nil {
		exporter.lost.Add(decisions)
		exporter.throttle.Log(exporter.log.Warn, "", "traces not exported", "decisions", decisions, "error", err)
	}
}

func spans(position readiness.Position, steps []journal.Step) (all []*tracepb.Span) {
	trace, whole := identify(position)
	for _, step := range steps {
		span := &tracepb.Span{
			TraceId: trace, SpanId: whole, Name: step.Name, Kind: tracepb.Span_SPAN_KIND_INTERNAL,
			StartTimeUnixNano: uint64(step.Start.UnixNano()), EndTimeUnixNano: uint64(step.End.UnixNano()),
			Attributes: []*commonpb.KeyValue{
				attribute("vipgate.instance_id", position.InstanceID),
				attribute("vipgate.revision", strconv.FormatUint(position.Revision, 10)),
				attribute("vipgate.detail", step.Detail),
			},
		}
		if step.Name != journal.WholeDecision {
			id := sha256.Sum256(append([]byte(step.Name), trace...))
			span.SpanId, span.ParentSpanId = id[:8], whole
		}
		if step.Failed {
			span.Status = &tracepb.Status{Code: tracepb.Status_STATUS_CODE_ERROR, Message: step.Detail}
		}
		all = append(all, span)
	}
	return all
}

func attribute(key, value string) *commonpb.KeyValue {
	return &commonpb.KeyValue{
		Key: key, Value: &commonpb.AnyValue{Value: &commonpb.AnyValue_StringValue{StringValue: value}},
	}
}
