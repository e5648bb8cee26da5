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
	// ProbeInterval is the time between the starts of two probes, ProbeWithin the timeout of a probe.
	// A response is valid until the timeout of the next probe.
	ProbeInterval = time.Second
	ProbeWithin   = time.Second
	// StateInterval is the time between two state probes while they agree with the stream. The probes
	// in between check liveness only: Meridio's load balancer logs two lines for each Watch, and none
	// for a call of an unimplemented service.
	StateInterval = 30 * time.Second
	// maxContradictions is the number of consecutive probes that contradict the stream at which Watch
	// fails. A change may reach one connection earlier than the other, but both have received it
	// before the next probe.
	maxContradictions = 2
)

// ClientOptions configure a Client.
type ClientOptions struct {
	// Host is the host name of the pod. A load balancer with another identifier belongs to another pod
	// and counts as unavailable.
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
	opts ClientOptions
	log  *slog.Logger

	probes, failures atomic.Uint64
}

// Stats are counters since the start.
type Stats struct {
	// Probes counts all probes, Failures the failed ones.
	Probes, Failures uint64
}

// NewClient returns a client.
func NewClient(o ClientOptions) *Client {
	o.Interval, o.Within = cmp.Or(o.Interval, ProbeInterval), cmp.Or(o.Within, ProbeWithin)
	o.StateInterval = cmp.Or(o.StateInterval, StateInterval)
	return &Client{opts: o, log: cmp.Or(o.Log, slog.New(slog.DiscardHandler))}
}

// Stats returns the counters.
func (c *Client) Stats() Stats { return Stats{Probes: c.probes.Load(), Failures: c.failures.Load()} }

// Service implements readiness.Fallback.
func (c *Client) Service() string { return Service }

// state is the state of a load balancer.
type state struct {
	available bool
	detail    string // for an operator, one line
}

// stateOf returns the state that a message reports for this pod.
func (c *Client) stateOf(m *loadbalancerv1.Response) state {
	s := state{detail: "the load balancer is unavailable: no stream has targets, or it knows no frontend of its pod"}
	for _, t := range m.GetTargets() {
		switch id, found := t.GetContext()[identifierKey]; {
		case found && id == c.opts.Host:
			return state{true, "the load balancer is available; its protocol has no state of single VIPs"}
		case found:
			s.detail = fmt.Sprintf("the load balancer has the identifier %.64q instead of this host name %q", id, c.opts.Host)
		}
	}
	return s
}

// answer is a received state or an error.
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
	defer running.Wait()
	defer cancel()
	stream, err := loadbalancerv1.NewStreamAvailabilityServiceClient(first).Watch(ctx, &emptypb.Empty{})
	if err != nil {
		return err
	}
	messages, probes := make(chan answer), make(chan answer)
	running.Go(func() { c.receive(ctx, stream, messages) })
	w := watch{client: c, publish: publish}
	next := time.NewTimer(0) // next probe; started by the first message of the stream
	next.Stop()
	defer next.Stop()
	var vipsChanged <-chan struct{}
	w.vips, vipsChanged = c.opts.VIPs()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case m := <-messages:
			if err = m.err; err != nil {
				break
			}
			if w.current == nil {
				next.Reset(0)
			}
			err = w.received(m)
		case now := <-next.C:
			ask := c.askSign
			if w.wantsState(now) {
				ask = c.askState
			}
			running.Go(func() { c.probe(ctx, second, ask, probes) })
		case p := <-probes:
			err = w.probed(p)
			// Skip the probes that this process missed while it was paused.
			next.Reset(max(0, time.Until(p.at.Add(c.opts.Interval))))
		case <-vipsChanged:
			w.vips, vipsChanged = c.opts.VIPs()
			err = w.reconfigured()
		}
		if err != nil {
			return err
		}
	}
}

// receive passes the messages of a stream to out until ctx or the stream ends.
func (c *Client) receive(ctx context.Context, stream grpc.ServerStreamingClient[loadbalancerv1.Response],
	out chan<- answer,
) {
	for {
		m, err := stream.Recv()
		a := answer{at: time.Now(), err: err}
		if err == nil {
			a.state = c.stateOf(m)
		}
		select {
		case out <- a:
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
	late, cancel := context.WithTimeoutCause(ctx, c.opts.Within, errLate)
	defer cancel()
	c.probes.Add(1)
	// The lease counts from the request: this process may have been paused before it read the
	// response.
	at := time.Now()
	a, err := ask(late, conn)
	if err != nil && ctx.Err() == nil {
		c.failures.Add(1)
	}
	switch {
	case err == nil:
	case context.Cause(late) == errLate:
		err = fmt.Errorf("the load balancer hangs or is starved of CPU: %w: %v", errLate, c.opts.Within)
	case errors.Is(err, io.EOF):
		err = errors.New("the load balancer ended the probe without a state")
	}
	a.at, a.err = at, err
	select {
	case out <- a:
	case <-ctx.Done():
	}
}

// askState opens a Watch and returns its first message.
func (c *Client) askState(ctx context.Context, conn grpc.ClientConnInterface) (answer, error) {
	stream, err := loadbalancerv1.NewStreamAvailabilityServiceClient(conn).Watch(ctx, &emptypb.Empty{})
	var m *loadbalancerv1.Response
	if err == nil {
		m, err = stream.Recv()
	}
	if err != nil {
		return answer{}, err
	}
	return answer{state: c.stateOf(m)}, nil
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

// watch is the state of one Watch.
type watch struct {
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
// a probe that failed or contradicted the stream, because liveness alone must not renew the lease
// then.
func (w *watch) wantsState(now time.Time) bool {
	return w.lost || w.contradictions > 0 || now.Sub(w.agreed) >= w.client.opts.StateInterval
}

// received handles a message of the stream.
func (w *watch) received(m answer) error {
	if w.current != nil && *w.current == m.state {
		return w.renew(m.at, false)
	}
	if w.current == nil || w.current.available != m.available {
		w.since = m.at
	}
	w.client.log.Info("load balancer availability", "available", m.available, "detail", m.detail)
	w.current, w.contradictions = &m.state, 0
	return w.renew(m.at, true)
}

// probed handles the result of a probe. A response that agrees with the stream renews the lease.
func (w *watch) probed(p answer) error {
	if p.err != nil {
		if !w.lost {
			w.client.log.Warn("load balancer probe failed", "error", p.err, "lease_end_in", time.Until(w.leaseEnd))
		}
		w.lost = true
		return nil
	}
	if w.lost {
		w.client.log.Info("load balancer answers probes again")
	}
	w.lost = false
	switch {
	case p.alive:
		return w.renew(p.at, false)
	case p.available == w.current.available:
		w.contradictions, w.agreed = 0, p.at
		return w.renew(p.at, false)
	}
	if w.contradictions++; w.contradictions < maxContradictions {
		return nil
	}
	return fmt.Errorf("the load balancer answers available=%v on a second connection and reported available=%v: "+
		"it does not update its streams", p.available, w.current.available)
}

// reconfigured publishes the state for a changed set of VIPs, without renewing the lease.
func (w *watch) reconfigured() error {
	if w.current == nil {
		return nil
	}
	return w.publish(readiness.FallbackState{VIPs: w.states(), At: time.Now(), LeaseEnd: w.leaseEnd})
}

// renew renews the lease from the given time, and publishes it with the state if that changed.
func (w *watch) renew(at time.Time, changed bool) error {
	o := w.client.opts
	w.leaseEnd = at.Add(o.Interval + o.Within)
	s := readiness.FallbackState{At: at, LeaseEnd: w.leaseEnd}
	if changed {
		s.VIPs = w.states()
	}
	return w.publish(s)
}

// states returns the readiness of all VIPs.
func (w *watch) states() []readiness.VIPReadiness {
	all := make([]readiness.VIPReadiness, 0, len(w.vips))
	is := vip.NotReady
	if w.current.available {
		is = vip.Ready
	}
	for _, v := range w.vips {
		all = append(all, readiness.VIPReadiness{VIP: v, State: is, Detail: w.current.detail, Since: w.since})
	}
	return all
}
