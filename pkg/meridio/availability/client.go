package availability

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	loadbalancerv1 "github.com/vipgate/vipgate/pkg/api/loadbalancer/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Service is the name of the gRPC service.
var Service = loadbalancerv1.StreamAvailabilityService_ServiceDesc.ServiceName

// identifierKey is the key of the pod's host name in the context of a target.
const identifierKey = "identifier"

const (
	// ProbeInterval is the time between the starts of two probes, ProbeWithin the timeout of a
	// probe. A response is valid until the timeout of the next probe.
	ProbeInterval = time.Second
	ProbeWithin   = time.Second
	// StateInterval is the time between two state probes while they agree with the stream. The
	// probes in between check liveness only: Meridio's load balancer logs two lines for each Watch,
	// and none for a call of an unimplemented service.
	StateInterval = 30 * time.Second
	// maxContradictions is the number of consecutive probes that contradict the stream at which
	// Watch fails. A change may reach one connection earlier than the other, but both have received
	// it before the next probe.
	maxContradictions = 2
)

// ClientOptions configure a Client.
type ClientOptions struct {
	// Host is the host name of the pod. A load balancer with another identifier belongs to another
	// pod and counts as unavailable.
	Host string
	// VIPs returns all VIPs of the attractor, and a channel that is closed when they may have changed.
	VIPs func() ([]vip.VIP, <-chan struct{})
	// Interval, Within and StateInterval are shorter in tests. Defaults: ProbeInterval, ProbeWithin
	// and StateInterval.
	Interval, Within, StateInterval time.Duration
	Log                             *slog.Logger
}

// Client reads the availability of a load balancer. It implements readiness.Fallback.
type Client struct {
	options ClientOptions
	log     *slog.Logger

	probes, failures atomic.Uint64
}

// Stats are counters since the start.
type Stats struct {
	// Probes counts all probes, Failures the failed ones.
	Probes, Failures uint64
}

// NewClient returns a client.
func NewClient(options ClientOptions) *Client {
	options.Interval, options.Within = cmp.Or(options.Interval, ProbeInterval), cmp.Or(options.Within, ProbeWithin)
	options.StateInterval = cmp.Or(options.StateInterval, StateInterval)
	return &Client{options: options, log: cmp.Or(options.Log, slog.New(slog.DiscardHandler))}
}

// Stats returns the counters.
func (c *Client) Stats() Stats { return Stats{Probes: c.probes.Load(), Failures: c.failures.Load()} }

// Service implements readiness.Fallback.
func (c *Client) Service() string { return Service }

type state struct {
	available bool
	detail    string // for an operator, one line
}

// stateOf returns the state that a message reports for this pod.
func (c *Client) stateOf(message *loadbalancerv1.Response) state {
	unavailable := state{
		detail: "the load balancer is unavailable: no stream has targets, or it knows no frontend of its pod",
	}
	for _, target := range message.GetTargets() {
		switch host, found := target.GetContext()[identifierKey]; {
		case found && host == c.options.Host:
			return state{true, "the load balancer is available; its protocol has no state of single VIPs"}
		case found:
			unavailable.detail = fmt.Sprintf("the load balancer has the identifier %.64q instead of this host name %q", host,
				c.options.Host)
		}
	}
	return unavailable
}

type answer struct {
	state
	at  time.Time // receipt of a stream message, or start of a probe
	err error
	// alive marks the response of a liveness probe, which has no state.
	alive bool
}

// Watch implements readiness.Fallback.
func (c *Client) Watch(ctx context.Context, first, second grpc.ClientConnInterface,
	publish func(readiness.FallbackState) error,
) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	// Deferred calls run in reverse order: cancel ends the goroutines before Wait.
	defer running.Wait()
	defer cancel()
	stream, err := loadbalancerv1.NewStreamAvailabilityServiceClient(first).Watch(ctx, &emptypb.Empty{})
	if err != nil {
		return err
	}
	messages, probes := make(chan answer), make(chan answer)
	running.Go(func() { c.receive(ctx, stream, messages) })
	view := view{client: c, publish: publish}
	// Probes start with the first message of the stream: without its state they prove nothing.
	nextProbe := time.NewTimer(0)
	nextProbe.Stop()
	defer nextProbe.Stop()
	var vipsChanged <-chan struct{}
	view.vips, vipsChanged = c.options.VIPs()
	for err == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case message := <-messages:
			if view.current == nil && message.err == nil {
				nextProbe.Reset(0)
			}
			err = view.received(message)
		case now := <-nextProbe.C:
			ask := c.askSign
			if view.wantsState(now) {
				ask = c.askState
			}
			// The loop must handle messages while the probe waits for its response.
			running.Go(func() { c.probe(ctx, second, ask, probes) })
		case result := <-probes:
			err = view.probed(result)
			// Skip the probes that this process missed while it was paused.
			nextProbe.Reset(max(0, time.Until(result.at.Add(c.options.Interval))))
		case <-vipsChanged:
			view.vips, vipsChanged = c.options.VIPs()
			err = view.reconfigured()
		}
	}
	return err
}

// receive passes the messages of a stream to out until ctx or the stream ends.
func (c *Client) receive(ctx context.Context, stream grpc.ServerStreamingClient[loadbalancerv1.Response],
	out chan<- answer,
) {
	for {
		message, err := stream.Recv()
		received := answer{at: time.Now(), err: err}
		if err == nil {
			received.state = c.stateOf(message)
		}
		select {
		case out <- received:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}

// errLate is the cause of a probe's timeout.
var errLate = errors.New("no answer in time")

// probe sends one probe on the second connection and passes the result to out.
func (c *Client) probe(ctx context.Context, conn grpc.ClientConnInterface,
	ask func(context.Context, grpc.ClientConnInterface) (answer, error), out chan<- answer,
) {
	late, cancel := context.WithTimeoutCause(ctx, c.options.Within, errLate)
	defer cancel()
	c.probes.Add(1)
	// The lease counts from the request: this process may have paused before it read the response.
	start := time.Now()
	result, err := ask(late, conn)
	if err != nil && ctx.Err() == nil {
		c.failures.Add(1)
	}
	switch {
	case err == nil:
	case context.Cause(late) == errLate:
		err = fmt.Errorf("the load balancer hangs or is starved of CPU: %w: %v", errLate, c.options.Within)
	case errors.Is(err, io.EOF):
		err = errors.New("the load balancer ended the probe without a state")
	}
	result.at, result.err = start, err
	select {
	case out <- result:
	case <-ctx.Done():
	}
}

// askState opens a Watch and returns its first message.
func (c *Client) askState(ctx context.Context, conn grpc.ClientConnInterface) (answer, error) {
	stream, err := loadbalancerv1.NewStreamAvailabilityServiceClient(conn).Watch(ctx, &emptypb.Empty{})
	if err != nil {
		return answer{}, err
	}
	message, err := stream.Recv()
	return answer{state: c.stateOf(message)}, err
}

// askSign probes liveness. It calls a service that Meridio's load balancer does not implement on
// this socket, so that the load balancer responds Unimplemented without a log line.
func (c *Client) askSign(ctx context.Context, conn grpc.ClientConnInterface) (answer, error) {
	_, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	switch status.Code(err) {
	case codes.Unimplemented, codes.NotFound:
		err = nil
	}
	return answer{alive: true}, err
}

type view struct {
	client  *Client
	publish func(readiness.FallbackState) error

	vips           []vip.VIP
	current        *state // of the stream; nil before the first message
	since          time.Time
	leaseEnd       time.Time
	contradictions int       // consecutive probes that contradicted current
	lost           bool      // the last probe failed
	agreed         time.Time // start of the last state probe that agreed; zero if none did
}

// wantsState reports whether the next probe requests the state: after each StateInterval, and after
// a probe that failed or contradicted the stream: then liveness alone must not renew the lease.
func (v *view) wantsState(now time.Time) bool {
	return v.lost || v.contradictions > 0 || now.Sub(v.agreed) >= v.client.options.StateInterval
}

// received handles a message of the stream, or its end.
func (v *view) received(message answer) error {
	switch {
	case message.err != nil:
		return message.err
	case v.current != nil && *v.current == message.state:
		return v.renew(message.at, false)
	case v.current == nil || v.current.available != message.available:
		// A new detail of the same state keeps the start of the state.
		v.since = message.at
	}
	v.client.log.Info("load balancer availability", "available", message.available, "detail", message.detail)
	v.current, v.contradictions = &message.state, 0
	return v.renew(message.at, true)
}

// probed handles the result of a probe. A response that agrees with the stream renews the lease.
func (v *view) probed(result answer) error {
	if result.err != nil {
		// Not an error of the watch: the lease expires unless a later probe renews it.
		if !v.lost {
			v.client.log.Warn("load balancer probe failed", "error", result.err, "lease_end_in", time.Until(v.leaseEnd))
		}
		v.lost = true
		return nil
	}
	if v.lost {
		v.client.log.Info("load balancer answers probes again")
	}
	v.lost = false
	switch {
	case result.alive:
		// wantsState requests liveness only while the stream and the probes agree.
		return v.renew(result.at, false)
	case result.available == v.current.available:
		v.contradictions, v.agreed = 0, result.at
		return v.renew(result.at, false)
	}
	if v.contradictions++; v.contradictions < maxContradictions {
		return nil
	}
	return fmt.Errorf("the load balancer answers available=%v on a second connection and reported available=%v: "+
		"it does not update its streams", result.available, v.current.available)
}

// reconfigured publishes the state for a changed set of VIPs, without renewing the lease.
func (v *view) reconfigured() error {
	if v.current == nil {
		return nil
	}
	return v.publish(readiness.FallbackState{VIPs: v.states(), At: time.Now(), LeaseEnd: v.leaseEnd})
}

// renew renews the lease from the given time, and publishes it with the state if that changed.
func (v *view) renew(from time.Time, changed bool) error {
	// The next probe starts after Interval, and its response is due after Within.
	v.leaseEnd = from.Add(v.client.options.Interval + v.client.options.Within)
	renewed := readiness.FallbackState{At: from, LeaseEnd: v.leaseEnd}
	if changed {
		renewed.VIPs = v.states()
	}
	return v.publish(renewed)
}

func (v *view) states() []readiness.VIPReadiness {
	readinesses := make([]readiness.VIPReadiness, 0, len(v.vips))
	common := vip.NotReady
	if v.current.available {
		common = vip.Ready
	}
	for _, prefix := range v.vips {
		readinesses = append(readinesses, readiness.VIPReadiness{
			VIP: prefix, State: common, Detail: v.current.detail, Since: v.since,
		})
	}
	return readinesses
}
